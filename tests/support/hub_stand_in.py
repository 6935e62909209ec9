"""A hub on the loopback that holds models in memory: what huggingface_hub needs to make, fill and read repositories."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

GATED = "gated"  # the owner whose files nobody may read
REVISIONS = ("main", "0" * 40)


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""

    @property
    def repositories(self):
        return self.server.repositories

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.about("/".join(parts[2:4]), parts[4:])
        else:
            files = self.repositories.get("/".join(parts[:2]))
            content = (files or {}).get("/".join(parts[4:]))
            if parts[0] == GATED:
                self.answer({}, 403, **{"X-Error-Code": "GatedRepo"})
            elif content is None:
                self.answer({}, 404, **{"X-Error-Code": "RepoNotFound" if files is None else "EntryNotFound"})
            else:
                self.answer(content, **{"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": "0" * 40})

    do_HEAD = do_GET

    def about(self, name, rest):
        if name not in self.repositories:
            self.answer({}, 404, **{"X-Error-Code": "RepoNotFound"})
            return
        if rest and rest[1] not in REVISIONS:
            self.answer({}, 404, **{"X-Error-Code": "RevisionNotFound"})
            return
        files = self.repositories[name]
        if rest[:1] == ["tree"]:
            self.answer([{"type": "file", "path": file, "size": len(c), "oid": "0" * 40} for file, c in files.items()])
        else:
            self.answer({"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"].split("/")[-1])))
            self.repositories.setdefault(name, {})
            self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
        elif parts[4:5] == ["preupload"]:
            asked = json.loads(body)["files"]
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            self.answer({"files": files})
        elif parts[4:5] == ["commit"]:
            name = "/".join(parts[2:4])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.repositories[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"http://{self.headers['Host']}/{name}/commit/{'0' * 40}"
            self.answer({"success": True, "commitUrl": url, "commitOid": "0" * 40})
        else:
            self.answer({"errors": [], "warnings": []})


@contextmanager
def hub():
    """Run one; gives its address and its repositories: files by name, by repository."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.repositories = {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.repositories
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
