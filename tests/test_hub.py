"""Pushed and pulled by timm's own functions, a model in another process gives the same logits, bit for bit.

The Hub is a stand-in on this machine, see hub_server.py. test_hub_faults.py does the same by our `push` and `load`, and
always runs.
"""
import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import torch

from hub_server import environment, serve

pytestmark = pytest.mark.full

TOKEN = 'a-token-of-the-tests'

MODELS = {  # by repository: an entrypoint and its keywords
    'someone/semantic': ('test_vit_sape2_ape', dict(
        img_size=[48, 80],
        patch_size=16,
        num_classes=7,
        pos_enc_kwargs={'sape2': {'preset': 'equations', 'bias_scale': 'learned', 'bias_init': -0.5}},
    )),
    'someone/rotary': ('test_vit_ape', dict(pos_enc='rope2d_mixed', img_size=64, reg_tokens=2, init_values=0.1)),
    'someone/grafted': ('vit_graft', dict(
        base='deit_tiny_distilled_patch16_224', pos_enc='sape2_k+rope2d', img_size=[48, 80], depth=2, num_classes=3)),
}

START = """
import json, os, sys
import torch
import timm
torch.set_num_threads(1)
models = json.loads(sys.argv[1])
folder = sys.argv[2]
assert not os.path.exists(os.environ['HF_HOME'])

def logits(model):
    height, width = model.patch_embed.img_size
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(x)
"""

PUSH = START + """
import timm_sape
for repo, (name, kwargs) in models.items():
    torch.manual_seed(len(repo))
    model = timm.create_model(name, **kwargs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    timm.models.push_to_hf_hub(model, repo, safe_serialization=True)
    torch.save(logits(model), os.path.join(folder, repo.replace('/', '-') + '.pushed'))
try:
    timm.models.push_to_hf_hub(model, 'someone/stolen', token='not-the-token', safe_serialization=True)
except Exception as e:
    print(type(e).__name__, '401' in str(e))
"""

PULL = START + """
import timm_sape
for repo in models:
    model = timm.create_model('hf-hub:' + repo, pretrained=True)
    torch.save(logits(model), os.path.join(folder, repo.replace('/', '-') + '.pulled'))
    try:
        timm.create_model('hf-hub:' + repo, pretrained=True, pos_enc='rope2d', pos_enc_kwargs={})
    except ValueError as e:
        print(e)
"""

PULL_WITHOUT_US = START + """
try:
    timm.create_model('hf-hub:' + list(models)[0], pretrained=True)
except RuntimeError as e:
    print(e)
assert 'timm_sape' not in sys.modules
"""


def run(script, hub, folder, cache):
    """Run a script in a process of its own with an empty cache. Returns its output."""
    done = subprocess.run(
        [sys.executable, '-c', script, json.dumps(MODELS), str(folder)],
        env=environment(hub, folder / cache), cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def exchange(tmp_path_factory):
    """Push and pull once. Returns the Hub, the folder with the logits of both sides, and the output of each process."""
    folder = tmp_path_factory.mktemp('hub')
    with serve(TOKEN) as hub:
        pushed = run(PUSH, hub, folder, 'cache-push')
        seen = len(hub.requests)
        pulled = run(PULL, hub, folder, 'cache-pull')
        unknown = run(PULL_WITHOUT_US, hub, folder, 'cache-unknown')
        yield dict(hub=hub, folder=folder, pushed=pushed, pulled=pulled, unknown=unknown, reads=hub.requests[seen:])


@pytest.mark.parametrize('repo', MODELS)
def test_same_logits_in_another_process(exchange, repo):
    pushed, pulled = (
        torch.load(exchange['folder'] / f'{repo.replace("/", "-")}.{end}') for end in ('pushed', 'pulled'))
    assert pushed.std() > 1e-3
    assert torch.equal(pushed, pulled)


@pytest.mark.parametrize('repo', MODELS)
def test_weights_came_over_the_hub(exchange, repo):
    assert sorted(exchange['hub'].files(repo)) == ['README.md', 'config.json', 'model.safetensors']
    for file in ('config.json', 'model.safetensors'):
        assert ('GET', f'/{repo}/resolve/main/{file}', 200) in exchange['reads']


def test_config_says_what_the_encoding_was(exchange):
    configs = {repo: json.loads(exchange['hub'].files(repo)['config.json']) for repo in MODELS}
    semantic, rotary = configs['someone/semantic'], configs['someone/rotary']
    assert semantic['architecture'] == 'test_vit_sape2_ape'
    assert semantic['model_args']['pos_enc'] == 'ape+sape2_k'
    assert semantic['model_args']['pos_enc_kwargs'] == {
        'sape2_k': {'preset': 'equations', 'bias_scale': 'learned', 'bias_init': -0.5}}
    assert semantic['model_args']['ref_grid_size'] == [3, 5]
    assert rotary['architecture'] == 'test_vit_ape'
    assert rotary['model_args']['pos_enc'] == 'rope2d_mixed'
    assert not rotary['model_args']['pos_enc_kwargs']
    assert 'backend' not in json.dumps(configs)


def test_pulling_as_another_encoding_is_refused(exchange):
    lines = exchange['pulled'].splitlines()
    assert len(lines) == len(MODELS)
    assert 'ape+sape2_k' in lines[0] and 'cannot be changed to rope2d' in lines[0]
    assert 'trained with pos_enc rope2d_mixed, which cannot be changed to rope2d ' in lines[1]
    assert 'ape+auto_rope2d+auto_sape2_k' in lines[2] and 'cannot be changed to ape+auto_rope2d' in lines[2]


def test_reader_without_the_import_meets_timms_error(exchange):
    assert exchange['unknown'] == 'Unknown model (test_vit_sape2_ape)\n'


def test_wrong_token_writes_nothing(exchange):
    assert exchange['pushed'] == 'HfHubHTTPError True\n'
    assert 'someone/stolen' not in exchange['hub'].repos


def test_stand_in_refuses_what_the_hub_refuses():
    """If the stand-in accepted more than the Hub, the tests above would prove less."""
    def ask(method, path, body=b'', token=None):
        headers = {'Authorization': f'Bearer {token}'} if token else {}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(urllib.request.Request(hub.url + path, body or None, headers, method=method)) as reply:
                return reply.status, ''
        except urllib.error.HTTPError as e:
            return e.code, e.headers['X-Error-Code']

    repo = json.dumps({'organization': 'a', 'name': 'b', 'private': True}).encode()
    announced = json.dumps({'objects': [{'oid': '0' * 64, 'size': 1}]}).encode()
    commit = json.dumps({'key': 'lfsFile', 'value': {'oid': '0' * 64, 'path': 'w.bin'}}).encode()
    with serve('token') as hub:
        assert ask('POST', '/api/repos/create', repo) == (401, 'Unauthorized')
        assert ask('POST', '/api/repos/create', repo, 'wrong') == (401, 'Unauthorized')
        assert ask('GET', '/api/models/a/b', token='token') == (404, 'RepoNotFound')
        assert ask('POST', '/api/repos/create', repo, 'token') == (200, '')
        assert ask('POST', '/api/repos/create', repo, 'token')[0] == 409
        assert ask('GET', '/api/models/a/b', token='token') == (200, '')
        assert ask('GET', '/api/models/a/b') == (404, 'RepoNotFound')
        assert ask('HEAD', '/a/b/resolve/main/README.md', token='token') == (404, 'EntryNotFound')
        assert ask('HEAD', '/a/b/resolve/0/README.md', token='token') == (404, 'RevisionNotFound')
        assert ask('PUT', f'/large/{"0" * 64}', b'x') == (403, 'Forbidden')
        assert ask('POST', '/a/b.git/info/lfs/objects/batch', announced, 'token') == (200, '')
        assert ask('PUT', f'/large/{"0" * 64}', b'x') == (400, 'BadRequest')
        assert ask('POST', '/api/models/a/b/commit/main', commit) == (401, 'Unauthorized')
        assert ask('POST', '/api/models/a/b/commit/main', commit, 'token') == (400, 'BadRequest')
        assert ask('GET', '/api/datasets/a/b') == (501, 'NotImplemented')
