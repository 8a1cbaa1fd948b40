"""A small hub on the loopback address: as much of the Hugging Face hub as its own client needs to read and to write."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

TOKEN = "hf_right"


class SmallHub:
    """Repositories as {name: {revision: {file: bytes}}}; ``asked`` lists every request."""

    def __init__(self):
        self.repositories, self.private, self.gated, self.asked = {}, set(), set(), []
        self.objects = {}  # uploaded by their SHA-256
        self.cut = {}  # file -> bytes after which its next download breaks off
        self.cards = []  # that were validated
        self.url = ""

    def add(self, name, folder, *, revision="main", private=False):
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        self.repositories.setdefault(name, {})[revision] = files
        self.private |= {name} if private else set()

    def sha(self, name, revision):
        files = self.repositories[name].get(revision)
        if files is None:  # by its commit
            return revision if revision in {self.sha(name, known) for known in self.repositories[name]} else None
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def files(self, name, revision):
        return next((f for r, f in self.repositories[name].items() if revision in (r, self.sha(name, r))), None)

    def downloaded(self):
        """Files whose content was asked for as a whole, or from somewhere on: not the ranges of headers."""
        return [path for method, path, span in self.asked if method == "GET" and "/resolve/" in path and not span]


@contextmanager
def serving():
    hub = SmallHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words):
            pass

        def answer(self, status, body=b"", headers=()):
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status, code):
            self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

        def body(self):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def repository(self, name):
            """Whether this request may see a repository; the answer is sent if not."""
            allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if name in hub.repositories and (name not in hub.private or allowed):
                return True
            self.refuse(401, "RepoNotFound")
            return False

        def closed(self, name):
            """Whether files of a gated repository are refused, as they are without a token or without access."""
            if name in hub.gated and (token := self.headers.get("Authorization")) != f"Bearer {TOKEN}":
                self.refuse(403 if token else 401, "GatedRepo")
                return True
            return False

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(self.path.partition("?")[0])
            hub.asked.append((self.command, path, self.headers.get("Range")))
            if path == "/api/whoami-v2":
                right = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                self.answer(*((200, {"name": "owner", "type": "user"}) if right else (401, {"error": "no"})))
            elif found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                self.information(found[1], found[2] or "main")
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/auth-check", path):
                if not self.closed(found[1]):
                    self.answer(200)
            elif found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/tree/([^/]+)((?:/.+)?)", path):
                self.listing(*found.groups())
            elif found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.file(*found.groups())
            else:
                self.refuse(404, "EntryNotFound")

        def information(self, name, revision):
            if self.repository(name):
                if (files := hub.files(name, revision)) is None:
                    return self.refuse(404, "RevisionNotFound")
                siblings = [{"rfilename": file} for file in files]
                gated = "manual" if name in hub.gated else False
                self.answer(200, {"id": name, "sha": hub.sha(name, revision), "siblings": siblings, "gated": gated})

        def listing(self, name, revision, folder):
            if self.repository(name):
                files = hub.files(name, revision) or {}
                rows = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in files.items()
                    if f"/{file}".startswith(f"{folder}/")
                ]
                self.answer(200, rows)

        def file(self, name, revision, file):
            if not self.repository(name) or self.closed(name):
                return
            files = hub.files(name, revision)
            if files is None or file not in files:
                return self.refuse(404, "RevisionNotFound" if files is None else "EntryNotFound")
            data, status = files[file], 200
            marks = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": hub.sha(name, revision)}
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
                marks["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[first : last + 1], 206
            if self.command == "GET" and file in hub.cut and not (span and span[2]):
                self.send_response(status)
                for mark, value in {**marks, "Content-Length": str(len(data))}.items():
                    self.send_header(mark, value)
                self.end_headers()
                self.wfile.write(data[: hub.cut.pop(file)])
                self.wfile.flush()
                self.close_connection = True
                return self.connection.shutdown(2)
            self.answer(status, data, {**marks, "Accept-Ranges": "bytes"})

        def do_PUT(self):
            data = self.body()
            hub.objects[hashlib.sha256(data).hexdigest()] = data
            self.answer(200)

        def do_POST(self):
            path, body = unquote(self.path.partition("?")[0]), self.body()
            hub.asked.append((self.command, path, None))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and path != "/api/validate-yaml":
                self.refuse(401, "RepoNotFound")
            elif path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization', 'owner')}/{asked['name']}"
                if name in hub.repositories:
                    return self.answer(409, {"error": "exists"})
                hub.repositories[name] = {"main": {}}
                hub.private |= {name} if asked.get("private") or asked.get("visibility") == "private" else set()
                self.answer(200, {"url": f"{hub.url}/{name}", "name": name})
            elif path == "/api/validate-yaml":
                hub.cards.append(json.loads(body)["content"])
                self.answer(200, {"errors": [], "warnings": []})
            elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
                rows = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                self.answer(200, {"files": rows})
            elif found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
                rows = [
                    {**one, "actions": {"upload": {"href": f"{hub.url}/put/{one['oid']}"}}}
                    for one in json.loads(body)["objects"]
                ]
                self.answer(200, {"transfer": "basic", "objects": rows}, {"Content-Type": "application/json"})
            elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
                self.commit(found[1], [json.loads(line) for line in body.decode().splitlines()])
            else:
                self.refuse(404, "EntryNotFound")

        def commit(self, name, rows):
            files = hub.repositories[name]["main"]
            for row in rows:
                value = row["value"]
                if row["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif row["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            sha = hub.sha(name, "main")
            self.answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{name}/commit/{sha}"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
