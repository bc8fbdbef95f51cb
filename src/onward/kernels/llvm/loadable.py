"""A script that loads machine code from the standard input as `compiler.load` does. It runs in a separate process,
since LLVM aborts the process if the code is malformed."""

import resource
import sys

LOADABLE = b"loadable"
MAX_MEMORY = 1 << 32  # bytes; sections without content may claim any size


def main(llvmlite: str, declared: str, defined: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    sys.path.append(llvmlite)
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in declared.split(","):
        llvm.add_symbol(name, 1)  # an address that is never called
    target = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(sys.stdin.buffer.read()))
    engine.finalize_object()
    if all(engine.get_function_address(name) for name in defined.split(",")):
        sys.stdout.buffer.write(LOADABLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
