"""A small hub on the loopback: what huggingface_hub asks of the real one, with failures to order.

It stores repositories as lists of commits, and large files by their SHA-256, as the hub does.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN, READER = "hf_theSecretOfTheOwner", "hf_theSecretOfAReader"
USERS = {TOKEN: "me", READER: "reader"}
LARGE = 1_000
"""Files of this size are large ones, as those that end like weights."""


@dataclass
class Repo:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b"x"}])
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def head(self) -> str:
        return hashlib.sha1(f"{id(self)} {len(self.commits)}".encode()).hexdigest()


class Hub:
    """The state of the server; tests read it, and order failures."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.received: list[str] = []
        """SHA-256 of each large file that arrived whole."""
        self.faults: list[tuple[str, object]] = []
        """(pattern of "METHOD path", what to do): the first that fits fails a request, once."""
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        self.url = ""

    def fault(self, request: str) -> object:
        for number, (pattern, what) in enumerate(self.faults):
            if re.search(pattern, request):
                del self.faults[number]
                return what
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words: object) -> None:
        pass

    def do(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        path = unquote(parts.path)
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        what = self.hub.fault(request)
        size = int(self.headers.get("Content-Length") or 0)
        if what == "hang":
            self.hub.hangs.set()
            self.hub.goes_on.wait(120)
        if what in ("cut", "hang"):  # in the middle of what the client sends
            self.rfile.read(size // 2)
            self.connection.close()
            self.close_connection = True
            return
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(self.chunks())
        else:
            self.body = self.rfile.read(size)
        if isinstance(what, int):
            self.answer(what, {"error": f"ordered {what}"})
            return
        self.user = USERS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        for pattern, name in ROUTES:
            if match := re.fullmatch(pattern, request):
                try:
                    getattr(self, name)(**match.groupdict())
                finally:
                    if what == "no answer":
                        self.close_connection = True
                return
        self.answer(404, {"error": f"unknown: {request}"})

    do_GET = do_POST = do_PUT = do_HEAD = do

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def answer(self, status: int, content: object = None, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def repo(self, name: str, write: bool = False) -> Repo | None:
        """Return a repository, or answer as the hub does to whom may not see or change it."""
        repo = self.hub.repos.get(name)
        owner = name.partition("/")[0] == self.user
        if self.user is None and (write or repo is None or repo.private):
            self.answer(401, {"error": "Invalid username or password."})
        elif repo is None or (repo.private and not owner):
            self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        elif write and not owner:
            self.answer(403, {"error": f"no write access to {name}"})
        else:
            return repo
        return None

    def whoami(self) -> None:
        if self.user is None:
            self.answer(401, {"error": "Invalid user token."})
        else:
            self.answer(200, {"type": "user", "name": self.user, "auth": {}})

    def create(self) -> None:
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.user
        name = f"{owner}/{asked['name']}"
        if owner != self.user:
            self.answer(403, {"error": f"no rights in the namespace {owner}"})
        elif name in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo"})
        else:
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.hub.repos[name] = Repo(private)
            self.answer(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def info(self, name: str, revision: str = "") -> None:
        if repo := self.repo(name):
            facts = {"id": name, "modelId": name, "sha": repo.head, "private": repo.private}
            files = [{"rfilename": file} for file in repo.files]
            self.answer(200, facts | {"siblings": files, "tags": [], "downloads": 0, "likes": 0})

    def auth(self, name: str) -> None:
        if self.repo(name, write=True):
            self.answer(200, {})

    def yaml(self) -> None:
        content = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.S)
        try:
            assert match and isinstance(yaml.safe_load(match[1]), dict)
        except (AssertionError, yaml.YAMLError) as error:
            self.answer(400, {"errors": [{"message": str(error)}], "warnings": []})
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def tree(self, name: str, revision: str, inner: str = "") -> None:
        if repo := self.repo(name):
            self.answer(200, [entry(path, content) for path, content in repo.files.items()])

    def preupload(self, name: str, revision: str) -> None:
        if repo := self.repo(name, write=True):
            files = []
            for file in json.loads(self.body)["files"]:
                there = repo.files.get(file["path"])
                large = is_large(file["path"], file["size"])
                known = entry(file["path"], there) if there is not None else {}
                oid = known["lfs"]["oid"] if "lfs" in known else known.get("oid")
                mode = "lfs" if large else "regular"
                files.append({"path": file["path"], "uploadMode": mode, "oid": oid})
            self.answer(200, {"files": [{"shouldIgnore": False, **file} for file in files]})

    def batch(self, name: str) -> None:
        if self.repo(name, write=True):
            objects = json.loads(self.body)["objects"]
            for item in objects:
                if item["oid"] not in self.hub.stored:
                    href = f"{self.hub.url}/store/{item['oid']}?signature=hush"
                    item["actions"] = {"upload": {"href": href}}
            self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.received.append(oid)
        self.hub.stored[oid] = self.body
        self.answer(200, b"")

    def commit(self, name: str, revision: str) -> None:
        if not (repo := self.repo(name, write=True)):
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        head, files = lines[0]["value"], dict(repo.files)
        if head.get("parentCommit") != repo.head:
            self.answer(412, {"error": "A commit has happened since. Please refresh."})
            return
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.stored[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repo.commits.append(files)
        repo.messages.append(head["summary"])
        url = f"{self.hub.url}/{name}/commit/{repo.head}"
        self.answer(200, {"commitUrl": url, "commitOid": repo.head})

    def resolve(self, name: str, revision: str, file: str) -> None:
        if not (repo := self.repo(name)):
            return
        if file not in repo.files:
            self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=repo.head)
            return
        etag = hashlib.sha256(repo.files[file]).hexdigest()
        self.answer(200, repo.files[file], ETag=f'"{etag}"', X_Repo_Commit=repo.head)


NAME, REVISION = r"(?P<name>[\w.-]+/[\w.-]+)", r"(?P<revision>\w+)"
ROUTES = [
    ("GET /api/whoami-v2", "whoami"),
    ("POST /api/repos/create", "create"),
    ("POST /api/validate-yaml", "yaml"),
    (f"GET /api/models/{NAME}/auth-check/write", "auth"),
    (f"GET /api/(models|datasets)/{NAME}/tree/{REVISION}(?P<inner>/.*)?", "tree"),
    (f"POST /api/models/{NAME}/preupload/{REVISION}", "preupload"),
    (f"POST /api/models/{NAME}/commit/{REVISION}", "commit"),
    (f"GET /api/(models|datasets)/{NAME}(/revision/{REVISION})?", "info"),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /store/(?P<oid>\w+)", "store"),
    (f"(GET|HEAD) (/datasets)?/{NAME}/resolve/{REVISION}/(?P<file>.*)", "resolve"),
]


def is_large(path: str, size: int) -> bool:
    return path.endswith(".safetensors") or size >= LARGE * 1_000


def entry(path: str, content: bytes) -> dict[str, object]:
    """Return what the hub lists of a file."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    facts = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if is_large(path, len(content)):
        oid = hashlib.sha256(content).hexdigest()
        facts["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return facts


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Path, token: str | None = TOKEN) -> dict[str, str]:
    """Return the variables of a process that knows this hub, and no other."""
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",  # this server stores large files as the hub did before
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return variables | ({"HF_TOKEN": token} if token else {})
