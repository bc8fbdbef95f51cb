"""A server on loopback that behaves as the Hugging Face hub does, and processes that use it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

CUT = 11 << 20  # bytes after which a connection breaks; the library resumes at a multiple of 10 MiB


@dataclass
class Repo:
    """A model on the hub. `trouble` is the failure to simulate: `gated`; `private`; an HTTP status; `full`: commits
    fail; `breaks`: the connection breaks in the middle of each file of more than CUT bytes the first time; `wrong`: a
    byte of each file is changed the first time; `hangs`: the hub does not answer. `answer` replaces the JSON reply."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    trouble: str | int = ""
    revisions: tuple[str, ...] = ("main",)
    broken: set[str] = field(default_factory=set)
    answer: bytes = b""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    authorization: str
    range: str


class Hub(ThreadingHTTPServer):
    """The hub's server: `repos` by name; `requests` are the received requests, in order; `storage` is a second host for
    large files."""

    daemon_threads = True

    def __init__(self, repos: dict[str, Repo], storage: Hub | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.storage = repos, storage
        self.objects = dict[str, bytes]()  # uploaded large files that are not committed yet, by SHA-256
        self.requests: list[Request] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.released = Event()  # set when requests that hang may end

    @contextmanager
    def running(self) -> Iterator[Hub]:
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield self
        finally:
            self.released.set()
            self.shutdown()
            self.server_close()

    def taken(self) -> list[Request]:
        """The requests since the last call, without the library's own daily request."""
        found, self.requests = [r for r in self.requests if "agent-harnesses" not in r.path], []
        return found


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        headers = self.headers
        request = Request(self.command, self.path, headers.get("Authorization", ""), headers.get("Range", ""))
        self.server.requests.append(request)
        for name, repo in self.server.repos.items():
            if found := re.match(rf"(?:/api/models)?/{name}/(revision|tree|resolve)/([^/?]+)/?([^?]*)", self.path):
                return self.answer(repo, *found.groups())
        if "agent-harnesses" in self.path:
            return self.send(404)
        return self.send(401, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        authorization = self.headers.get("Authorization", "")
        self.server.requests.append(Request(self.command, self.path, authorization, ""))
        if authorization != "Bearer hf_right":
            return self.send(403 if authorization else 401)
        if self.path == "/api/validate-yaml":
            return self.send_json({"warnings": [], "errors": []})
        if self.path == "/api/repos/create":
            name = "{organization}/{name}".format(**json.loads(body))
            created = name not in self.server.repos
            self.server.repos.setdefault(name, Repo({}))
            return self.send_json({"url": f"{self.server.url}/{name}"}, 200 if created else 409)
        found = re.match(
            r"(?:/api/models)?/([^/]+/[^/]+?)(?:\.git/info/lfs/objects/(batch)|/(preupload|commit)/main)", self.path
        )
        repo, kind = self.server.repos[found[1]], found[2] or found[3]
        if kind == "preupload":
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"
            files = [f["path"] for f in json.loads(body)["files"]]
            return self.send_json(
                {"files": [{"path": path, "uploadMode": mode(path), "shouldIgnore": False} for path in files]}
            )
        if kind == "batch":
            place = lambda one: {"upload": {"href": f"{self.server.storage.url}/{one['oid']}"}}
            objects = [one | {"actions": place(one)} for one in json.loads(body)["objects"]]
            return self.send_json({"transfer": "basic", "objects": objects})
        if repo.trouble == "full":
            return self.send(507)
        for change in map(json.loads, body.splitlines()):
            value = change["value"]
            match change["key"]:
                case "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repo.files[value["path"]] = self.server.storage.objects[value["oid"]]
                case "deletedFile":
                    del repo.files[value["path"]]
        url = f"{self.server.url}/{found[1]}/commit/{repo.commit}"
        return self.send_json({"commitUrl": url, "commitOid": repo.commit, "success": True})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(Request("PUT", self.path, self.headers.get("Authorization", ""), ""))
        self.server.objects[self.path.removeprefix("/")] = body
        self.send(200)

    def answer(self, repo: Repo, kind: str, revision: str, path: str) -> None:
        if not self.server.storage:  # the storage host does not check requests
            return self.send_file(repo, path)
        if isinstance(repo.trouble, int):
            return self.send(repo.trouble)
        if repo.trouble == "private" and self.headers.get("Authorization") != "Bearer hf_right":
            return self.send(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in (*repo.revisions, repo.commit):
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        if repo.trouble == "hangs":
            self.server.released.wait(60)
            return None
        if repo.answer and kind != "resolve":
            return self.send(200, {"Content-Type": "application/json"}, repo.answer)
        if kind == "revision":
            siblings = [{"rfilename": path} for path in repo.files]
            return self.send_json({"id": "x/y", "modelId": "x/y", "sha": repo.commit, "siblings": siblings})
        if kind == "tree":
            return self.send_json([entry(path, data) for path, data in repo.files.items()])
        if repo.trouble == "gated":
            return self.send(403, {"X-Error-Code": "GatedRepo"})
        if path not in repo.files:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
        return self.send_file(repo, path)

    def send_file(self, repo: Repo, path: str) -> None:
        data = repo.files[path]
        etag = f'"{entry(path, data).get("lfs", {}).get("oid") or oid(data)}"'
        if repo.trouble == "wrong" and self.command == "GET" and path not in repo.broken:
            repo.broken.add(path)
            data = bytes([data[0] ^ 1]) + data[1:]
        headers = {"ETag": etag, "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if self.server.storage and path.endswith(".safetensors"):
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
            return self.send(302, headers | {"Location": self.server.storage.url + self.path})
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        status = 206 if "Range" in self.headers else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        breaks = repo.trouble == "breaks" and self.command == "GET" and path not in repo.broken and len(data) > CUT
        self.send(status, headers, data[start:], cut=CUT if breaks else None)
        if breaks:
            repo.broken.add(path)
            self.close_connection = True
            self.connection.shutdown(2)
        return None

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, status: int, headers: dict[str, str] = {}, body: bytes = b"", cut: int | None = None) -> None:  # noqa: B006
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])


def oid(data: bytes) -> str:
    """The Git blob id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    """An entry in the list of files; weights are large files, for which Git stores only pointers."""
    sha256 = hashlib.sha256(data).hexdigest()
    lfs = {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 130}} if path.endswith(".safetensors") else {}
    return {"type": "file", "path": path, "oid": oid(sha256.encode() if lfs else data), "size": len(data), **lfs}


LOOKUPS = """
import json, sys
from pathlib import Path
from onward.base.errors import UserError
from onward.hub.folder import locate
from onward.hub.names import HubName
from onward.hub.upload import model_files, upload
for line in sys.stdin:
    said, wanted = [], json.loads(line)
    try:
        if folder := wanted.pop("upload", ""):
            files = {path: Path(folder, path) for path in model_files(Path(folder))}
            files["README.md"] = files.get("README.md", b"# A card")
            result = {"commit": upload(HubName.of(wanted["name"]), files, say=said.append)}
        else:
            result = {"folder": str(locate(**wanted, say=said.append))}
    except UserError as error:
        result = {"refused": str(error)}
    print(json.dumps(result | {"said": said}), flush=True)
"""


class Lookups:
    """A process that looks up names and uploads, with the environment that a user would set; writes beyond `room` bytes
    of a file fail, as on a full disk."""

    def __init__(self, endpoint: str, home: Path, room: int = 0, **environment: str) -> None:
        own = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",  # Xet transfers large files in parts, to other kinds of servers
        }
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOKUPS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            cwd=home.parent,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))) if room else None,
        )

    def __call__(self, name: str, **options: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"name": name, **options}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def put_in_cache(name: str, folder: Path) -> Path:
    """Copy a model's folder into the cache of this process, like a download of `name`; return the cached folder."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c" * 40)
    shutil.copytree(folder, place / "snapshots" / ("c" * 40))
    return place
