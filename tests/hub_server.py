"""A stand-in for the Hugging Face Hub on this machine, in memory, for tests.

It implements the part of the Hub's HTTP API that `timm_sape.hub`, `timm.models.push_to_hf_hub`,
`timm.create_model('hf-hub:...')` and transformers use: creating repositories and branches, committing regular and LFS
files, querying files, and downloading them completely or from a byte offset. It has only models and plain uploads, so
clients need `HF_HUB_DISABLE_XET=1`.

    with serve(token='secret') as hub:
        ...  # clients run with HF_ENDPOINT=hub.url and HF_TOKEN=secret
        hub.files('user/name')
        hub.faults['model.safetensors'] = ['reset']  # faults of the next downloads of this file
"""
import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = ('.safetensors', '.bin')


class Refusal(Exception):
    """An error response: status, the Hub's error code, and a text."""


class Hub:
    """All repositories, and a log of requests.

    Attributes:
        repos: For each repository, `private`, the files of each commit by its hash, and the newest of each branch. If
            it is `gated`, this account may not read it. `message` is that of the last commit.
        large: LFS files by their SHA-256.
        requests: (method, path, status) of each request, in order.
        faults: By path of a file, the faults of its next GET requests, in order. `reset`: the connection is reset after
            half of the file; `close`: it is closed there; `short`: half of the file is sent as if it were all of it;
            `tamper`: a bit is flipped.
    """

    def __init__(self, token):
        self.token = token
        self.url = ''
        self.repos = {}
        self.large = {}
        self.announced = set()  # LFS files that an owner has announced for upload
        self.requests = []
        self.faults = {}
        self.lock = threading.Lock()

    def files(self, repo_id, branch='main'):
        """Files of the newest commit, by path."""
        repo = self.repos[repo_id]
        return repo['commits'][repo['branches'][branch]]

    def commit(self, repo_id, files, branch='main'):
        repo = self.repos[repo_id]
        content = [(path, hashlib.sha256(data).hexdigest()) for path, data in sorted(files.items())]
        parent = repo['branches'].get(branch)
        commit = hashlib.sha1(json.dumps([parent, content]).encode()).hexdigest()
        repo['branches'][branch] = commit
        repo['commits'][commit] = files
        return commit


def etag(path, data):
    """The Hub's id of a file: SHA-256 for LFS, git's hash for other files."""
    if path.endswith(LFS_SUFFIXES):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b'blob %d\0' % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub: Hub

    def log_message(self, *args):
        pass

    def answer(self, status=200, body=b'', breaks_off='', **headers):
        """Send bytes as they are, anything else as JSON. Underscores in names of headers become dashes."""
        if not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {'Content_Type': 'application/json', **headers}
        self.hub.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in {'Content_Length': len(body), **headers}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body[:len(body) // 2] if breaks_off else body)
        if breaks_off:
            self.close_connection = True
        if breaks_off == 'reset':  # no orderly end: the reader gets an error from the operating system
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            self.connection.close()

    def read_body(self):
        if self.headers.get('Transfer-Encoding') != 'chunked':
            return self.rfile.read(int(self.headers.get('Content-Length', 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b''.join(chunks)

    def handle_request(self):
        path = unquote(urlsplit(self.path).path)
        body = self.read_body()
        try:
            for method, pattern, function in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method.split():
                    with self.hub.lock:
                        function(self, body, *match.groups())
                    return
            raise Refusal(501, 'NotImplemented', f'This stand-in has no {self.command} {path}')
        except Refusal as e:
            status, code, text = e.args
            self.answer(status, {'error': text}, X_Error_Code=code, X_Error_Message=text)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def owned(self):
        return self.headers.get('Authorization') == f'Bearer {self.hub.token}'

    def require_token(self):
        if not self.owned():
            raise Refusal(401, 'Unauthorized', 'Invalid username or password.')

    def revision(self, repo_id, name):
        """The repository and the hash of the commit that `name` stands for."""
        if self.headers.get('Authorization') and not self.owned():  # even where no token is needed
            raise Refusal(401, 'Unauthorized', 'Invalid credentials in Authorization header')
        repo = self.hub.repos.get(repo_id)
        if repo is None or repo['private'] and not self.owned():
            raise Refusal(404, 'RepoNotFound', 'Repository not found')
        if repo.get('gated'):
            raise Refusal(403, 'GatedRepo', 'Access to this model is restricted')
        commit = repo['branches'].get(name, name)
        if commit not in repo['commits']:
            raise Refusal(404, 'RevisionNotFound', f'Invalid rev id: {name}')
        return repo, commit

    # ---- writing

    def whoami(self, body):
        self.require_token()
        self.answer(200, {'type': 'user', 'name': 'someone'})

    def create_repo(self, body):
        self.require_token()
        given = json.loads(body)
        repo_id = f'{given["organization"]}/{given["name"]}'
        url = {'url': f'{self.hub.url}/{repo_id}', 'name': repo_id}
        if given['organization'] == 'others':
            raise Refusal(403, 'Forbidden', "You don't have the rights to create a model there")
        if repo_id in self.hub.repos:
            return self.answer(409, {'error': 'You already created this model repo', **url})
        private = bool(given.get('private')) or given.get('visibility') == 'private'
        self.hub.repos[repo_id] = {'private': private, 'commits': {}, 'branches': {}}
        self.hub.commit(repo_id, {})
        self.answer(200, url)

    def create_branch(self, body, repo_id, name):
        self.require_token()
        repo, commit = self.revision(repo_id, 'main')
        if name in repo['branches']:
            raise Refusal(409, 'Conflict', 'Reference already exists')
        repo['branches'][name] = commit
        self.answer(200)

    def check_card(self, body):
        assert json.loads(body)['repoType'] == 'model'
        self.answer(200, {'errors': [], 'warnings': []})

    def announce_files(self, body, repo_id, revision):
        """Tell the client which files go to LFS, and which it does not need to send."""
        self.require_token()
        repo, commit = self.revision(repo_id, revision)
        there = repo['commits'][commit]
        self.answer(200, {'files': [{
            'path': file['path'],
            'uploadMode': 'lfs' if file['path'].endswith(LFS_SUFFIXES) else 'regular',
            'shouldIgnore': False,
            'oid': etag(file['path'], there[file['path']]) if file['path'] in there else None,
        } for file in json.loads(body)['files']]})

    def announce_large(self, body, repo_id):
        self.require_token()
        self.revision(repo_id, 'main')
        objects = []
        for item in json.loads(body)['objects']:
            entry = {'oid': item['oid'], 'size': item['size']}
            if item['oid'] not in self.hub.large:
                self.hub.announced.add(item['oid'])
                entry['actions'] = {'upload': {'href': f'{self.hub.url}/large/{item["oid"]}'}}
            objects.append(entry)
        self.answer(200, {'transfer': 'basic', 'objects': objects})

    def upload_large(self, body, oid):
        """Accept an LFS file. As on the Hub, knowing the address is the permission."""
        if oid not in self.hub.announced:
            raise Refusal(403, 'Forbidden', 'Not announced')
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, 'BadRequest', 'The content is not what was announced')
        self.hub.large[oid] = body
        self.answer(200)

    def commit_files(self, body, repo_id, revision):
        """Make a commit. The request has a JSON object per line: a header, then operations."""
        self.require_token()
        repo, commit = self.revision(repo_id, revision)
        files = dict(repo['commits'][commit])
        for line in body.splitlines():
            operation = json.loads(line)
            kind, value = operation['key'], operation['value']
            if kind == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif kind == 'lfsFile':
                if value['oid'] not in self.hub.large:
                    raise Refusal(400, 'BadRequest', f'{value["path"]} was never uploaded')
                files[value['path']] = self.hub.large[value['oid']]
            elif kind == 'header':
                repo['message'] = value['summary']
            else:
                raise Refusal(501, 'NotImplemented', f'This stand-in has no {kind} in commits')
        commit = self.hub.commit(repo_id, files, revision)
        self.answer(200, {'commitOid': commit, 'commitUrl': f'{self.hub.url}/{repo_id}/commit/{commit}'})

    # ---- reading

    def model_info(self, _, repo_id, revision):
        repo, commit = self.revision(repo_id, revision or 'main')
        siblings = [{'rfilename': path} for path in sorted(repo['commits'][commit])]
        self.answer(200, {
            'id': repo_id, 'modelId': repo_id, 'sha': commit, 'private': repo['private'], 'siblings': siblings,
            'tags': [], 'downloads': 0, 'likes': 0})

    def download(self, _, repo_id, revision, path):
        repo, commit = self.revision(repo_id, revision)
        data = repo['commits'][commit].get(path)
        if data is None:
            raise Refusal(404, 'EntryNotFound', 'Entry not found')
        headers = {'X_Repo_Commit': commit, 'ETag': f'"{etag(path, data)}"'}
        faults = self.hub.faults.get(path)
        fault = faults.pop(0) if faults and self.command == 'GET' else ''
        if fault == 'short':
            data = data[:len(data) // 2]
        elif fault == 'tamper':
            data = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
        start = re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range', ''))  # a client that resumes a download
        if start:
            headers['Content_Range'] = f'bytes {start[1]}-{len(data) - 1}/{len(data)}'
            return self.answer(206, data[int(start[1]):], **headers)
        self.answer(200, data, fault if fault in ('reset', 'close') else '', **headers)


MODEL = r'([\w.-]+/[\w.-]+)'
ROUTES = (
    ('GET', '/api/whoami-v2', Handler.whoami),
    ('POST', '/api/repos/create', Handler.create_repo),
    ('POST', f'/api/models/{MODEL}/branch/([^/]+)', Handler.create_branch),
    ('POST', '/api/validate-yaml', Handler.check_card),
    ('POST', f'/api/models/{MODEL}/preupload/([^/]+)', Handler.announce_files),
    ('POST', f'/{MODEL}[.]git/info/lfs/objects/batch', Handler.announce_large),
    ('PUT', '/large/([0-9a-f]{64})', Handler.upload_large),
    ('POST', f'/api/models/{MODEL}/commit/([^/]+)', Handler.commit_files),
    ('GET', f'/api/models/{MODEL}(?:/revision/([^/]+))?', Handler.model_info),
    ('GET HEAD', f'/{MODEL}/resolve/([^/]+)/(.+)', Handler.download),
)


@contextlib.contextmanager
def serve(token):
    """Run a Hub on a free port. Writing, and reading private repositories, takes `token`."""
    hub = Hub(token)
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('BoundHandler', (Handler,), {'hub': hub}))
    server.daemon_threads = True
    hub.url = f'http://127.0.0.1:{server.server_address[1]}'
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub, cache):
    """The environment of a process that talks to this Hub alone and keeps its files in `cache`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith('HF_') and not k.lower().endswith('_proxy')}
    path = [str(Path(find_spec('timm_sape').origin).parents[1]), env.get('PYTHONPATH', '')]
    return {
        **env, 'HF_ENDPOINT': hub.url, 'HF_TOKEN': hub.token, 'HF_HOME': str(cache), 'HF_HUB_DISABLE_XET': '1',
        'HF_HUB_DISABLE_TELEMETRY': '1', 'HF_HUB_DISABLE_PROGRESS_BARS': '1', 'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(path)}
