"""timm_sape.hub: what it pushes, what it refuses to push, and its messages when a pull goes wrong.

The Hub is the stand-in of hub_server.py. Each pull runs in a process of its own with an empty cache: a fork of a
process that has imported everything and done nothing else.
"""
import errno
import io
import json
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.models import save_for_hf

import timm_sape
from common import Executed
from hub_server import environment, etag, serve
from timm_sape.hub import errors, files

TOKEN = 'a-token-of-the-tests'
REPO = 'someone/semantic'
MODEL = dict(img_size=[48, 80], num_classes=7, pos_enc='ape+sape2_k+rope2d', embed_dim=16, num_heads=2)
MODEL['pos_enc_kwargs'] = {'sape2_k': {'preset': 'equations'}, 'rope2d': {'resolution': 'rescale'}}
EXAMPLE = Path(__file__).parent.parent / 'examples' / 'push_pull.py'

# Reads code, a line at a time, and runs each in a fork.
WORKER = """
import json, os, sys
import torch
import timm
import timm_sape.hub
torch.set_num_threads(1)
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(case['output'], os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(case['env'])
        try:
            exec(case['code'])
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    print(os.waitpid(child, 0)[1], flush=True)
"""

PUSH = """
import resource
sys.path.insert(0, {tests!r})
from test_hub_faults import make, twice_as_precise
model = {model}
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    timm_sape.hub.push(
        model, {repo!r}, revision={revision!r}, private={private}, {more} recipe={{'epochs': 3}}, data='digits',
        results={{'top-1': 12.5}}, model_card={{'license': 'mit'}})
    found = ['pushed']
except Exception as e:
    found = [type(e).__name__, str(e)]
print(json.dumps(found))
"""

PULL = """
import resource
cache, load = {cache!r}, {load}
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    model = load()
    height, width = model.patch_embed.img_size
    x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        print(json.dumps(['model', model.eval()(x).tolist()]))
except Exception as e:
    print(json.dumps([type(e).__name__, str(e)]))
"""
OURS = 'lambda: timm_sape.hub.load({repo!r}, cache_dir=cache{more})'
STOCK = 'lambda: timm.create_model("hf-hub:" + {repo!r}, pretrained=True, cache_dir=cache{more})'


class Processes:
    """Runs code in processes that share only the Hub."""

    def __init__(self, hub, folder):
        self.hub = hub
        self.folder = folder
        self.count = 0
        self.worker = subprocess.Popen(
            [sys.executable, '-c', WORKER], env=environment(hub, folder / 'no-cache'), cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, code, **env):
        """Returns the output."""
        self.count += 1
        output = self.folder / f'output-{self.count}'
        self.worker.stdin.write(json.dumps({'code': code, 'output': str(output), 'env': env}) + '\n')
        self.worker.stdin.flush()
        status = self.worker.stdout.readline()
        assert status == '0\n', output.read_text()
        return output.read_text()

    def empty_cache(self):
        self.count += 1
        return self.folder / f'cache-{self.count}'

    def push(self, repo=REPO, model='make()', revision=None, private=False, limit=0, token=TOKEN, more=''):
        """Returns `['pushed']` or `[type, message]`."""
        tests = str(Path(__file__).parent)
        code = PUSH.format(
            tests=tests, repo=repo, model=model, revision=revision, private=private, limit=limit, more=more)
        return json.loads(self.run(code, HF_TOKEN=token).splitlines()[-1])

    def pull(self, repo=REPO, cache=None, load=OURS, limit=0, token=TOKEN, **more):
        """Returns `['model', its logits]` or `[type, message]`."""
        more = ''.join(f', {name}={value!r}' for name, value in more.items())
        code = PULL.format(cache=str(cache or self.empty_cache()), load=load.format(repo=repo, more=more), limit=limit)
        return json.loads(self.run(code, HF_TOKEN=token).splitlines()[-1])

    def close(self):
        self.worker.stdin.close()
        assert self.worker.wait(60) == 0


def make(**kwargs):
    """A model whose parameters all differ from their initial values."""
    torch.manual_seed(0)
    model = timm.create_model('test_vit_pos_enc', **{**MODEL, **kwargs})
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture(scope='module')
def processes(tmp_path_factory):
    with serve(TOKEN) as hub:
        running = Processes(hub, tmp_path_factory.mktemp('hub'))
        assert running.push() == ['pushed']
        yield running
        running.close()


@pytest.fixture(scope='module')
def logits():
    x = torch.randn(2, 3, 48, 80, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = make().eval()(x)
    assert found.std() > 0.01
    return found.tolist()


@pytest.fixture
def hub(processes):
    yield processes.hub
    processes.hub.faults.clear()


def variant(hub, repo, files=None, **config):
    """A repository like the pushed one, except for some files (None to remove one) and entries of its config.json."""
    content = dict(hub.files(REPO))
    content['config.json'] = json.dumps({**json.loads(content['config.json']), **config}).encode()
    content.update(files or {})
    hub.repos[repo] = {'private': False, 'commits': {}, 'branches': {}}
    hub.commit(repo, {path: data for path, data in content.items() if data is not None})


def model_args(hub, **changed):
    return {**json.loads(hub.files(REPO)['config.json'])['model_args'], **changed}


# ---- pushes

def test_both_roads_give_the_same_logits(processes, hub, logits):
    before = len(hub.requests)
    assert processes.pull() == ['model', logits]
    weights = {path for _, path, _ in hub.requests[before:] if path.endswith('model.safetensors')}
    commit = hub.repos[REPO]['branches']['main']  # of the config, even if the branch has moved since
    assert weights == {f'/{REPO}/resolve/{commit}/model.safetensors'}
    assert processes.pull(load=STOCK) == ['model', logits]


def test_what_a_repository_holds(hub):
    files = hub.files(REPO)
    assert sorted(files) == ['README.md', 'config.json', 'model.safetensors']
    config = json.loads(files['config.json'])
    assert config['timm_sape'] == {
        'version': timm_sape.__version__, 'sha256': etag('model.safetensors', files['model.safetensors'])}
    assert config['num_classes'] == 7 and 'num_classes' not in config['model_args']


def test_card(processes, hub, logits):
    _, head, text = hub.files(REPO)['README.md'].decode().split('---\n', 2)
    head = yaml.safe_load(head)
    assert head['license'] == 'mit' and head['library_name'] == 'timm'
    assert {'timm', 'timm-sape', 'image-classification'} <= set(head['tags'])
    said = (
        '`ape+rope2d+sape2_k`', "{'preset': 'equations'}", timm_sape.get_encoding('sape2_k').paper, '48 x 80',
        'epochs: 3', '**Data:** digits', 'top-1: 12.5', f'timm-sape {timm_sape.__version__}')
    for words in said:
        assert words in text
    code = re.search(r'```python\n(.*?)```', text, re.DOTALL)[1]
    assert code.index('import timm_sape') < code.index('create_model')
    printed = processes.run(code + (
        'x = torch.randn(2, 3, 48, 80, generator=torch.Generator().manual_seed(1))\n'
        'with torch.no_grad():\n    print(json.dumps(model(x).tolist()))'))
    assert json.loads(printed) == logits


def test_revision_is_a_branch(processes, hub, logits):
    before = hub.files(REPO)
    for _ in range(2):  # once the repository has to be created, once it exists
        assert processes.push(model='make(pos_enc="ape", pos_enc_kwargs={})', revision='tried-ape') == ['pushed']
    assert hub.files(REPO) is before
    assert processes.pull() == ['model', logits]
    kind, pulled = processes.pull(revision='tried-ape')
    assert kind == 'model' and pulled != logits
    assert processes.pull(f'{REPO}@tried-ape') == ['model', pulled]
    assert processes.pull(f'{REPO}@tried-ape', revision='main') == [
        'ValueError', f"{REPO}@tried-ape and revision='main' are two revisions. Give one."]
    card = hub.files(REPO, 'tried-ape')['README.md'].decode()
    assert f'hf-hub:{REPO}@tried-ape' in card and 'sape2' not in card.split('## Model Details')[1].split('Arguments')[0]


def test_name_alone_is_ones_own_repository(processes, hub):
    assert processes.push('short', private=True, more="commit_message='Trained longer',") == ['pushed']
    assert hub.repos['someone/short']['private'] and not hub.repos[REPO]['private']
    assert hub.repos['someone/short']['message'] == 'Trained longer'
    assert 'hf-hub:someone/short' in hub.files('someone/short')['README.md'].decode()


def test_private_does_not_hide_what_is_pushed_to_a_public_repository(processes, hub):
    before = hub.files(REPO)
    kind, message = processes.push(REPO, private=True)
    assert kind == 'ValueError' and message.startswith(f'{REPO} exists and is public, so private=True would not hide')
    assert hub.files(REPO) is before
    assert processes.push('short', private=True) == processes.push('short', private=True) == ['pushed']


def test_pulled_and_pushed_again(processes, hub, logits):
    """No path of this machine is pushed."""
    again = f'timm_sape.hub.load({REPO!r}, cache_dir={str(processes.empty_cache())!r})'
    assert processes.push('someone/again', model=again) == ['pushed']
    assert processes.pull('someone/again') == ['model', logits]
    assert hub.files('someone/again')['config.json'] == hub.files(REPO)['config.json']


def test_other_arguments_at_the_pull(processes):
    for load in (OURS, STOCK):
        kind, pulled = processes.pull(load=load, num_classes=5, img_size=[64, 64])
        assert kind == 'model' and torch.tensor(pulled).shape == (2, 5)


def test_transformers(processes, logits):
    """TimmWrapper loads what we push, but not what stock timm pushes. We load what it saves, with a stale checksum."""
    stock, tuned = processes.folder / 'stock', processes.folder / 'tuned'
    save_for_hf(make(), stock, safe_serialization=True)
    code = f"""
import json, os
os.environ['HF_HOME'] = {str(processes.empty_cache())!r}
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained({REPO!r}, cache_dir={str(processes.empty_cache())!r}).eval()
x = torch.randn(2, 3, 48, 80, generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    found = model(x).logits.tolist()
processor = AutoImageProcessor.from_pretrained({REPO!r}, cache_dir={str(processes.empty_cache())!r})
try:
    AutoModelForImageClassification.from_pretrained({str(stock)!r})
    refused = ''
except TypeError as e:
    refused = str(e)
with torch.no_grad():
    model.timm_model.head.bias += 1
    model.save_pretrained({str(tuned)!r})
    moved = (timm_sape.hub.load({str(tuned)!r}).eval()(x) - torch.tensor(found)).tolist()
print(json.dumps([found, list(processor.data_config['input_size']), refused, moved]))
"""
    found, size, refused, moved = json.loads(processes.run(code).splitlines()[-1])
    moved = torch.tensor(moved)
    torch.testing.assert_close(moved, torch.ones_like(moved))
    assert found == logits
    assert size == [3, 48, 80]
    assert 'num_classes' in refused


@pytest.mark.full
def test_example(processes, hub):
    said = {}
    for command in ('push', 'pull'):
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), command, 'someone/digits', '--epochs', '1'],
            env=environment(hub, processes.folder / f'cache-{command}'), cwd=processes.folder, capture_output=True,
            text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said[command] = done.stdout.splitlines()
    assert said['push'][1] == said['pull'][1]
    top1, checksum = re.fullmatch(r'top-1 ([\d.]+) %, checksum of the logits ([0-9a-f]{16})', said['pull'][1]).groups()
    assert said['pull'][0] == "pulled a model with pos_enc='ape+sape2_k'"
    assert f'top-1 on the test images: {top1} %' in hub.files('someone/digits')['README.md'].decode()


# ---- refused pushes

def scaled(model):
    forward = model.forward
    model.forward = types.MethodType(lambda self, x: 2 * forward(x), model)


def other_activation(model):
    model.blocks[0].mlp.act = torch.nn.ReLU()


def new_head(model):
    model.head = torch.nn.Sequential(torch.nn.Linear(16, 7), torch.nn.ReLU())


def diverged(model):
    model.head.bias.data.fill_(float('nan'))


def twice_as_precise(model):
    model.double().head.bias.data += 1e-12


CHANGES = {
    'the forward pass': (scaled, 'logits differ by up to .* no parameter: give it to create_model'),
    'a module without parameters': (other_activation, 'logits differ by up to'),
    'the layers': (new_head, r'could not be loaded back: .*head\.0\.weight'),
    'the dtype': (twice_as_precise, r'other values when .* torch.float32, the default: convert it first, model\.to'),
    'the sense': (diverged, 'logits for random images are not finite'),
    'the memory format': (lambda model: model.to(memory_format=torch.channels_last), r'channels_last.*model\.to\('),
    'a class as argument': (
        lambda model: timm.create_model('test_vit_rope2d', act_layer=torch.nn.ReLU),
        r"'act_layer' is not serializable.* model_config=\{'model_args': \{'act_layer': 'relu'\}\}"),
    'all': (lambda model: torch.nn.Linear(2, 2), 'must be a model made by timm.create_model, got a Linear'),
}


@pytest.mark.parametrize('given, message', [
    (dict(data_config={'crop_pct': '0.9'}), "crop_pct .* must be a number, .*not '0.9'"),
    (dict(data_config={'interpolation': 3}), 'interpolation .* must be'),
    (dict(data_config={'crop': 0.9}), "data_config has no entry 'crop'. Use only .* crop_pct"),
    (dict(model_card={'licence': 'mit'}), "model_card has no entry 'licence'. Use only .* license"),
    (dict(model_config={'label_names': ['a', 'b']}), r"label_names must be 4 strings, .* got \['a', 'b'\]"),
    (dict(model_config={'label_names': ['a', 'b', 'c', 'a']}), "has 'a' twice.* label_descriptions="),
    (dict(model_config={'label_names': [0, 1, 2, 3]}), 'label_names must be 4 strings'),
    (dict(num_classes=0, model_config={'label_names': ['a']}), 'The model has no classes. Leave label_names out'),
])
def test_entries_that_would_be_wrong(given, message, tmp_path):
    model = timm.create_model('test_vit_rope2d', num_classes=given.pop('num_classes', 4))
    with pytest.raises(ValueError, match=message):
        timm_sape.hub.save(model, tmp_path / 'model', **given)
    assert not list(tmp_path.iterdir())


def test_home_folder(tmp_path, monkeypatch):
    """No folder with the name ~ is made, which somebody might delete by `rm -r ~`."""
    (tmp_path / 'home').mkdir()
    (tmp_path / 'here').mkdir()
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.chdir(tmp_path / 'here')
    timm_sape.hub.save(timm.create_model('test_vit_rope2d'), '~/model')
    assert [path.name for path in (tmp_path / 'home').iterdir()] == ['model']
    assert not list((tmp_path / 'here').iterdir())
    timm_sape.hub.load('~/model')
    timm_sape.hub.load('local-dir:~/model')
    with pytest.raises(ValueError, match='There is no folder ~nobody-here'):
        timm_sape.hub.load(Path('~nobody-here/model'))


def test_a_folder_on_another_disk(tmp_path, monkeypatch):
    """It could not be renamed from the disk of temporary files to its own."""
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path / 'nowhere'))
    timm_sape.hub.save(make(), tmp_path / 'model')


def test_a_name_in_place_of_a_class(tmp_path):
    """As the message advises."""
    model = timm.create_model('test_vit_rope2d', act_layer=torch.nn.ReLU).eval()
    timm_sape.hub.save(model, tmp_path / 'model', model_config={'model_args': {'act_layer': 'relu'}})
    loaded = timm.create_model(f'local-dir:{tmp_path / "model"}', pretrained=True).eval()
    x = torch.randn(1, 3, 160, 160)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize('what', CHANGES)
def test_refused(what, tmp_path):
    change, message = CHANGES[what]
    model = make()
    model = change(model) or model
    with pytest.raises(ValueError, match=message) as error:
        timm_sape.hub.save(model, tmp_path / 'model')
    assert '\n' not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_another_way_to_compute_attention(tmp_path):
    """It is no part of a model. `exportable=True` chooses it, and rounds otherwise."""
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_ape', depth=4, img_size=64, exportable=True)
    assert not any(block.attn.fused_attn for block in model.blocks)
    timm_sape.hub.save(model, tmp_path / 'model')


def test_refused_before_anything_is_pushed(processes, hub):
    before = len(hub.requests)
    kind, message = processes.push('someone/refused', model='[m := make(), twice_as_precise(m)][0]')
    assert kind == 'ValueError' and message.startswith('Not saved, since 1 entries such as head.bias have other values')
    assert len(hub.requests) == before


def test_wrong_token_pushes_nothing(processes, hub):
    assert processes.push('someone/stolen', token='not-the-token') == [
        'ValueError',
        f'{hub.url} does not accept the token (token=, HF_TOKEN, `hf auth login`): is it whole, and still valid?']
    assert 'someone/stolen' not in hub.repos


def test_token_of_the_call(processes, hub, logits):
    """It comes before the one in HF_TOKEN."""
    given = f'token={TOKEN!r},'
    assert processes.push('someone/given', token='not-the-token', private=True, more=given) == ['pushed']
    load = OURS.replace('cache_dir', f'{given} cache_dir')
    assert processes.pull('someone/given', load=load, token='not-the-token') == ['model', logits]


def test_no_permission_pushes_nothing(processes, hub):
    assert processes.push('others/model') == [
        'ValueError', 'The account of the token has no permission for this in others/model.']
    assert 'others/model' not in hub.repos


def test_full_disk_pushes_nothing(processes, hub):
    kind, message = processes.push('someone/large', limit=20_000)
    assert 'File too large' in message and '\n' not in message
    assert 'someone/large' not in hub.repos


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room(number):
    with pytest.raises(OSError, match='The disk is full, .*: no room for config.json of someone/model') as error:
        with errors.plain_errors('someone/model', None, 'config.json'):
            raise OSError(number, 'said by the system')
    assert error.value.errno == number


@pytest.mark.parametrize('kwargs, change', [
    ({}, lambda model: model.bfloat16()),
    ({}, torch.compile),
    ({'num_classes': 0}, lambda model: model),
    ({'in_chans': 1, 'dynamic_img_size': True}, lambda model: model),
])
def test_not_refused(kwargs, change, tmp_path):
    model = make(**kwargs)
    timm_sape.hub.save(change(model), tmp_path / 'model')
    pulled = timm.create_model(f'local-dir:{tmp_path}/model', pretrained=True)
    assert pulled.num_classes == kwargs.get('num_classes', 7)
    for name, value in model.state_dict().items():
        assert torch.equal(pulled.state_dict()[name].to(value), value)


def test_preprocessing_that_the_caller_gives(tmp_path):
    """Beside it stands the size that the model was made for, unless another one is given."""
    model = make(dynamic_img_size=True)
    for name, given in ('statistics', {'mean': [0.1, 0.2, 0.3]}), ('size', {'input_size': [3, 64, 64]}):
        timm_sape.hub.save(model, tmp_path / name, data_config=given)
        found = json.loads((tmp_path / name / 'config.json').read_text())['pretrained_cfg']
        expected = {'input_size': [3, 48, 80], 'mean': [0.5] * 3, **given}
        assert {key: found[key] for key in expected} == expected


def test_architectures_of_timm(tmp_path):
    """The license of the base is pushed, too."""
    timm_sape.hub.save(timm.create_model('test_vit', num_classes=3), tmp_path / 'model')
    card = (tmp_path / 'model' / 'README.md').read_text()
    assert 'Position encoding' not in card and f'license: {timm.get_pretrained_cfg("test_vit").license}\n' in card
    assert 'import timm_sape' not in card and 'needs' not in card and '- timm-sape' not in card
    timm_sape.hub.save(make(), tmp_path / 'ours')
    card = (tmp_path / 'ours' / 'README.md').read_text()
    assert 'import timm_sape' in card and 'needs the package timm-sape' in card and '- timm-sape' in card
    assert 'license: unknown\n' in card  # nobody has said one


def test_card_of_a_folder(tmp_path):
    """It does not say where the folder is on this machine, nor what nobody has told."""
    model = make(in_chans=1)
    timm_sape.hub.save(model, tmp_path / 'model', data='digits')
    card = (tmp_path / 'model' / 'README.md').read_text()
    assert "timm.create_model('local-dir:model', pretrained=True)" in card and str(tmp_path) not in card
    assert f'**Parameters:** {sum(p.numel() for p in model.parameters()):,}\n' in card
    assert '48 x 80, 1 channels' in card and '**Classes:** 7' in card
    assert '**Data:** digits' in card and 'Recipe' not in card and 'Results' not in card


@pytest.mark.parametrize('module, line', [
    ('my_package.position', "import my_package.position  # registers 'mine', 'yours'\n\n"),
    ('__main__', "# Register 'mine', 'yours' here.\n\n")])
def test_card_says_where_an_encoding_comes_from(module, line, tmp_path, own_registry):
    acts = {'__module__': module, 'position_bias': lambda self, grid: torch.zeros(())}
    for name in ('mine', 'yours'):
        timm_sape.register_encoding(name)(type(name, (timm_sape.PositionEncoding,), acts))
    timm_sape.hub.save(make(pos_enc='ape+auto_mine+yours', pos_enc_kwargs={}), tmp_path / 'model')
    card = (tmp_path / 'model' / 'README.md').read_text()
    assert f'import timm_sape  # registers the model: without it, timm says "Unknown model"\n{line}' in card
    assert '`mine` is not part of that package. Its encoding `yours` is not' in card and '`ape` is not' not in card


def test_saving_changes_nothing(tmp_path):
    model = make(drop_path_rate=0.5).train()
    model.blocks[0].eval()
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    timm_sape.hub.save(model, tmp_path / 'model')
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes and True in modes and False in modes
    assert [p.name for p in tmp_path.iterdir()] == ['model']
    with pytest.raises(ValueError, match='exists'):
        timm_sape.hub.save(model, tmp_path / 'model')


# ---- pulls that go wrong

FAULTS = {  # faults of the Hub by file, arguments of the pull, type of the error, message
    'token': ({}, {'token': 'not-the-token'}, 'ValueError', 'HUB does not accept the token (token=, HF_TOKEN'),
    'reset': (
        {'model.safetensors': ['reset']}, {}, 'ConnectionError',
        'The connection to HUB failed (ReadError: [Errno 104] Connection reset by peer). Incomplete files are not '
        'used; try again.'),
    'reset in the config': (
        {'config.json': ['reset']}, {}, 'ConnectionError', 'The connection to HUB failed (ReadError'),
    'short': (
        {'model.safetensors': ['short']}, {}, 'ConnectionError',
        'The connection to HUB failed (OSError: Consistency check failed: file should be of size'),
    'tampered': (
        {'model.safetensors': ['tamper']}, {}, 'ValueError',
        f'{REPO}: model.safetensors is not what the Hub says it is, by its checksum'),
    'tampered config': (
        {'config.json': ['tamper']}, {}, 'ValueError', f'{REPO}: config.json is not what the Hub says it is'),
    'full disk': (
        {}, {'limit': 20_000}, 'OSError',
        '[Errno 27] The disk is full, or a limit for files is reached: no room for model.safetensors of'),
    'revision': ({}, {'revision': 'none'}, 'ValueError', f"{REPO} has no revision 'none'."),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_fault(fault, processes, hub, logits):
    """There is a clear error and no file with wrong content in the cache, and the next pull without a fault works."""
    faults, kwargs, kind, message = FAULTS[fault]
    hub.faults.update({path: list(what) for path, what in faults.items()})
    cache = processes.empty_cache()
    found = processes.pull(cache=cache, **kwargs)
    assert found[0] == kind
    assert found[1].replace(hub.url, 'HUB').startswith(message)
    assert '\n' not in found[1]
    assert not any(hub.faults.values())
    kept = [file for file in cache.rglob('blobs/*') if file.suffix != '.incomplete']  # older clients resume from those
    content = {etag(path, data) for path, data in hub.files(REPO).items()}
    assert {file.name for file in kept} <= content
    for file in kept:
        assert file.name in {etag('.bin', file.read_bytes()), etag('', file.read_bytes())}
    assert processes.pull(cache=cache) == ['model', logits]


def test_tampering_would_be_seen(processes, hub, logits):
    """The bit that is flipped above changes the logits, and only our checksum notices."""
    hub.faults['model.safetensors'] = ['tamper']
    kind, pulled = processes.pull(load=STOCK)
    assert kind == 'model' and pulled != logits


def test_interrupted_download(processes, hub, logits):
    """The client resumes by itself. Older versions of huggingface_hub do so on the next call."""
    hub.faults['model.safetensors'] = ['close']
    cache = processes.empty_cache()
    found = processes.pull(cache=cache)
    assert found == ['model', logits] or found[0] == 'ConnectionError'
    assert not hub.faults['model.safetensors']
    assert processes.pull(cache=cache) == ['model', logits]


def test_no_connection(processes, logits):
    offline = processes.folder / 'offline'
    away = OURS.replace('lambda: ', 'lambda: setattr(timm_sape.hub.errors.constants, "HF_HUB_OFFLINE", True) or ')
    kind, message = processes.pull(cache=offline, load=away)
    assert kind == 'ConnectionError' and 'cannot be reached' in message and 'not in the cache' in message
    assert processes.pull(cache=offline) == ['model', logits]
    assert processes.pull(cache=offline, load=away) == ['model', logits]


@pytest.mark.parametrize('file', ['config.json', 'model.safetensors'])
def test_damage_in_the_cache(file, processes, hub, logits):
    """Truncated after the download, as by a file system that lost its last blocks."""
    cache = processes.empty_cache()
    processes.pull(cache=cache)
    blob = next(cache.rglob(file)).resolve()
    blob.write_bytes(blob.read_bytes()[:-7])
    kind, message = processes.pull(cache=cache)
    assert kind == 'ValueError' and f'{file} is not what the Hub says it is' in message
    assert processes.pull(cache=cache) == ['model', logits]


@pytest.mark.parametrize('when', ['before', 'after'])
def test_damage_is_seen_by_two_processes(when, tmp_path, monkeypatch):
    """The other one has removed the file before this one could read it, or after."""
    blob, link = tmp_path / ('0' * 64), tmp_path / 'model.safetensors'
    sha256 = files.sha256_of
    blob.write_bytes(b'damaged')
    link.symlink_to(blob)

    def removed(file):
        found = None if when == 'before' else sha256(file)
        link.unlink()
        blob.unlink()
        return found or sha256(file)

    monkeypatch.setattr(files, 'sha256_of', removed)
    with pytest.raises(ValueError, match='someone/model: model.safetensors is not what the Hub says it is'):
        files.refuse_damage('someone/model', link, None)


def test_a_cache_without_links(tmp_path):
    """As on Windows. A file there does not have its hash in its name, config.json has it."""
    file = tmp_path / 'model.safetensors'
    file.write_bytes(b'weights')
    for sha256 in (None, files.sha256_of(file)):
        files.refuse_damage('someone/model', file, sha256)
    with pytest.raises(ValueError, match='is not what config.json says it is.* It was removed from the cache'):
        files.refuse_damage('someone/model', file, '0' * 64)
    assert not file.exists()


def test_nothing_is_executed(processes, hub, tmp_path):
    trap = tmp_path / 'executed'
    malicious = io.BytesIO()
    torch.save({'head.bias': Executed(str(trap))}, malicious)
    variant(hub, 'someone/pickle', {'model.safetensors': None, 'pytorch_model.bin': malicious.getvalue()})
    assert processes.pull('someone/pickle') == [
        'ValueError', 'someone/pickle has no model.safetensors. Pickles, which can execute code, are not read. Save '
        'the model by timm_sape.hub, or by timm with safe_serialization=True.']
    kind, message = processes.pull('someone/pickle', load=STOCK)
    assert kind == 'ValueError' and message.startswith("Cannot read the checkpoint for 'test_vit_pos_enc'")
    assert not trap.exists()
    malicious.seek(0)
    torch.load(malicious, weights_only=False, pickle_module=pickle)  # without weights_only it runs
    assert trap.exists()


def test_repositories_that_are_not_right(processes, hub, logits):
    wrong = {}

    def expect(message, repo='someone/wrong', **kwargs):
        kind, found = processes.pull(repo, **kwargs)
        assert kind == 'ValueError' and found.startswith(message) and '\n' not in found, found
        wrong[message] = found

    expect("There is no repository 'someone/none' at http://", 'someone/none')
    variant(hub, 'someone/wrong')
    hub.repos['someone/wrong']['private'] = True
    assert processes.pull('someone/wrong') == ['model', logits]
    expect("There is no repository 'someone/wrong' at http://", token='')
    hub.repos['someone/wrong']['gated'] = True
    expect('someone/wrong is gated: ask for access on its page, and give a token of that account.')
    variant(hub, 'someone/wrong', {'config.json': b'{"architecture": "test_v'})
    expect('someone/wrong: config.json is not JSON (JSONDecodeError')
    variant(hub, 'someone/wrong', {'config.json': b'[1, 2]'})
    expect('someone/wrong: all of config.json must be a mapping, not [1, 2].')
    variant(hub, 'someone/wrong', {'config.json': None})
    expect('someone/wrong has no config.json.')
    variant(hub, 'someone/wrong', architecture='vit_of_tomorrow')
    expect("someone/wrong is a 'vit_of_tomorrow', which neither timm")
    variant(hub, 'someone/wrong', model_args=model_args(hub, pos_enc='ape+warp9'))
    unknown = f'someone/wrong: timm-sape {timm_sape.__version__} cannot make its position encoding.'
    expect(unknown)
    assert "Unknown position encoding 'warp9'" in wrong[unknown]
    expect("Unknown position encoding 'warp9'", load=STOCK)
    variant(hub, 'someone/wrong', model_args=model_args(hub, embed_dim=15))
    expect('someone/wrong: model_args.embed_dim of config.json is 15. embed_dim=15 is not divisible by num_heads=2.')
    variant(hub, 'someone/wrong', timm_sape={'version': timm_sape.__version__, 'sha256': '0' * 64})
    expect('someone/wrong: model.safetensors is not what config.json says it is, by its checksum')
    variant(hub, 'someone/wrong', {'model.safetensors': hub.files(REPO)['model.safetensors'][:-100]}, timm_sape={})
    expect('someone/wrong: Cannot read the checkpoint')
    expect("Cannot read the checkpoint for 'test_vit_pos_enc'", load=STOCK)


def test_versions(processes, hub, logits):
    major, minor = map(int, timm_sape.__version__.split('.')[:2])
    for version, loads in (
            (f'{major}.{minor + 1}.0', False), (f'{major + 1}.0', False), (f'{major}.{minor}.99', True),
            (f'{major}.{minor - 1}.7', True), (None, True)):
        variant(hub, 'someone/version', timm_sape={'version': version} if version else {})
        kind, found = processes.pull('someone/version')
        if loads:
            assert (kind, found) == ('model', logits)
        else:
            assert kind == 'ValueError' and '\n' not in found
            assert found.startswith(f'someone/version was written by timm-sape {version}, newer than ')
