"""Run code that a model wrote, and its tests, in a separate program, which imports only the standard library:

    python -I sandbox.py < JOB    JOB is JSON: code, tests, secret, seconds, memory (bytes)

It prints the secret with the number of each test that passes. Before the code runs, the process limits itself:

- processor time, memory, the size of a file and open files, by setrlimit on every POSIX system;
- files, by Landlock (Linux 5.13 and later): it can read only the folders of Python and of the system's libraries, the
  current folder and a few special files, and write only in the current folder and to /dev/null;
- other processes and programs, signals, sockets and the attributes of files, by seccomp (Linux on x86-64 and ARM64);
  elsewhere other processes and threads by setrlimit, unless the user is root;
- the capabilities of root are dropped.

If the system lacks one of these restrictions, the others still apply. This is not a virtual machine: it does not
protect against defects of the kernel, and code can deceive its tests, because both run in the same interpreter.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress
from typing import Any

FILE_SIZE, OPEN_FILES = 1 << 24, 64  # maximum number of bytes per file, and of open files
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, the same on all machines
WRITE_FILE, READ_FILE, READ_FOLDER, REMOVE_FILE, MAKE_FILE, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
RIGHTS = (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1  # all access rights of Landlock's versions 1, 2 and 3
SIGNAL_OF_PARENT, NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 1, 38, 22, 2  # arguments of prctl
CAPABILITY_VERSION = 0x20080522
MACHINES = {
    "x86_64": (0xC000003E, 0, 56),
    "aarch64": (0xC00000B7, 1, 220),
}  # seccomp's architecture, column in REFUSED, number of clone
CLONE_THREAD = 1 << 16
REFUSED = {  # system calls by their numbers on x86-64 and ARM64; -1: no such call
    "processes": ((57, -1), (58, -1), (435, 435)),  # fork, vfork, clone3; callers of clone3 then try clone
    "programs": ((59, 221), (322, 281)),  # execve, execveat
    "signals": ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424)),  # kill, ..., pidfd_send_signal
    "memory of others": ((101, 117), (310, 270), (311, 271)),  # ptrace, process_vm_readv, process_vm_writev
    "limits of others": ((302, 261), (203, 122), (142, 118), (144, 119), (141, 140)),  # prlimit64, sched_*, setpriority
    "network": ((41, 198), (425, 425)),  # socket, io_uring_setup
    "namespaces": ((272, 97), (308, 268)),  # unshare, setns
    "modes": ((90, -1), (91, 52), (268, 53), (452, 452)),  # chmod, fchmod, fchmodat, fchmodat2
    "owners": ((92, -1), (93, 55), (94, -1), (260, 54)),  # chown, fchown, lchown, fchownat
    "times": ((132, -1), (235, -1), (261, -1), (280, 88)),  # utime, utimes, futimesat, utimensat
    "attributes": (
        (188, 5),
        (189, 6),
        (190, 7),
        (197, 14),
        (198, 15),
        (199, 16),
        (463, 463),
        (466, 466),
    ),  # setxattr...
    "shared memory and keys": (
        (29, 194),
        (68, 186),
        (64, 190),
        (240, 180),
        (248, 217),
        (250, 219),
    ),  # shmget, ..., keyctl
}
libc = ctypes.CDLL(None, use_errno=True)  # Landlock and seccomp need no privileges, unlike namespaces


def limit_resources(seconds: float, memory: int) -> None:
    limits = {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": FILE_SIZE,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    for name, limit in limits.items():
        set_limit(name, limit)


def set_limit(name: str, limit: int) -> None:
    """Set a resource limit if the system supports it."""
    with suppress(AttributeError, ValueError, OSError):
        resource.setrlimit(getattr(resource, name), (limit, limit))


def limit_files() -> None:
    """Restrict the access to files as described at the top of this file. Does nothing on a system without Landlock."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    all_rights = RIGHTS[min(version, len(RIGHTS)) - 1]
    rules = libc.syscall(CREATE_RULESET, struct.pack("Q", all_rights), 8, 0)
    read = READ_FILE | READ_FOLDER
    folders = [*sys.path, f"{sys.base_prefix}/lib", "/usr", "/lib", "/lib64"]
    allowed = {folder: read for folder in folders if os.path.isdir(folder)}
    allowed[os.getcwd()] = read | WRITE_FILE | REMOVE_FILE | MAKE_FILE | TRUNCATE
    allowed |= {"/dev/null": READ_FILE | WRITE_FILE, "/dev/urandom": READ_FILE, "/etc/localtime": READ_FILE}
    for path, rights in allowed.items():
        with suppress(OSError):  # the path does not exist
            descriptor = os.open(path, os.O_PATH)
            libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights & all_rights, descriptor), 0)
            os.close(descriptor)
    libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


def drop_capabilities() -> None:
    libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))


def limit_system_calls() -> bool:
    """Forbid the calls in REFUSED and new processes, by a seccomp filter; return whether the filter is installed."""
    if platform.machine() not in MACHINES:
        return False
    machine, column, clone = MACHINES[platform.machine()]
    numbers = [pair[column] for calls in REFUSED.values() for pair in calls if pair[column] >= 0]
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the filter
    # 0x26: ENOSYS, so that the caller tries clone after clone3
    kill, refuse, allow = 0x80000000, 0x00050026, 0x7FFF0000
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    after = len(numbers) + 3  # instructions from the test of the first number to `refuse`
    program += [(at_least, after, 0, 0x40000000)]  # system calls of the x32 interface
    program += [(equal, after - 1 - i, 0, number) for i, number in enumerate(numbers)]
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 1, 0, CLONE_THREAD)]
    program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    return libc.prctl(SET_SECCOMP, FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0) == 0


def run(job: dict[str, Any], results: int) -> None:
    """Run a job's program, then each test in a copy of its global names. A line with the secret and the test's number
    is written for each test that passes; lines without the secret, which the program may print, do not count."""
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(job["code"], "solution", "exec"), names)
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, "test", "exec"), dict(names))
        except BaseException:  # the test has failed or called exit
            continue
        os.write(results, f"{job['secret']} {number}\n".encode())


def main() -> None:
    job = json.load(sys.stdin)
    results, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    limit_resources(job["seconds"], job["memory"])
    if sys.platform == "linux":
        libc.prctl(SIGNAL_OF_PARENT, signal.SIGKILL)  # the system kills this process when its parent ends
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        limit_files()
        drop_capabilities()
    if sys.platform != "linux" or not limit_system_calls():
        set_limit("RLIMIT_NPROC", 0)
    try:
        run(job, results)
    finally:
        os._exit(0)  # exits even if threads are still running


if __name__ == "__main__":
    main()
