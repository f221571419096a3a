"""timm_sape.hub.load of folders and of a wrong config.json: the same model, or a line that says why not."""
import copy
import json
import random
import re
import resource
import threading
import time

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import timm_sape
from timm_sape import hub
from timm_sape.loading import load_model

MODEL = dict(
    img_size=[48, 80], num_classes=7, pos_enc='ape+sape2_k+rope2d', embed_dim=16, depth=2, num_heads=2,
    pos_enc_kwargs={'sape2_k': {'npos': 9}})
IMAGES = torch.randn(2, 3, 48, 80, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A folder, and the model in it, whose parameters all differ from their initial values."""
    folder = tmp_path_factory.mktemp('saved') / 'model'
    torch.manual_seed(0)
    model = timm.create_model('test_vit_nope', **MODEL).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    hub.save(model, folder)
    return folder, model


@pytest.fixture
def config(saved):
    """The config, and a function that writes a config and loads the folder."""
    file = saved[0] / 'config.json'
    before = file.read_text()

    def load(config, **kwargs):
        file.write_text(config if isinstance(config, str) else json.dumps(config))
        return hub.load(saved[0], **kwargs)

    yield json.loads(before), load
    file.write_text(before)


@torch.no_grad()
def assert_same(loaded, model):
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(loaded.eval()(IMAGES), model(IMAGES))


# ---- folders

def test_folders(saved, monkeypatch):
    """By path and by string; relative, absolute, and with one slash, like a repository; with other arguments."""
    folder, model = saved
    monkeypatch.chdir(folder.parents[1])
    relative = folder.relative_to(folder.parents[1])
    assert str(relative).count('/') == 1
    for name in (folder, relative, str(folder), str(relative), f'./{relative}', f'local-dir:{folder}'):
        assert_same(hub.load(name), model)
    assert hub.load(folder, num_classes=3).num_classes == 3
    with pytest.raises(ValueError, match="unexpected keyword argument 'warp'") as error:
        hub.load(folder, warp=3)
    assert 'again' not in str(error.value)  # the folder is right
    assert hub.load(folder, img_size=[64, 64]).eval()(torch.randn(1, 3, 64, 64)).shape == (1, 7)
    with pytest.raises(ValueError, match="is a folder and has no revision 'main'. Write hf-hub:.* for the Hub"):
        hub.load(relative, revision='main')
    monkeypatch.setattr('timm_sape.hub.errors.get_session', lambda: 1 / 0)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(folder.parent / 'cache'))
    with pytest.raises(ConnectionError, match=f'config.json of {relative} is not in the cache'):
        hub.load(f'hf-hub:{relative}')


def test_folder_of_another_architecture(tmp_path):
    """A model of timm, and one that was grafted onto it."""
    model = timm.create_model('test_vit', num_classes=3).eval()
    hub.save(model, tmp_path / 'model')
    x = torch.randn(1, 3, 160, 160)
    assert torch.equal(hub.load(tmp_path / 'model').eval()(x), model(x))
    grafted = timm_sape.graft(model, 'sape2_k').eval()
    hub.save(grafted, tmp_path / 'grafted')
    assert torch.equal(hub.load(tmp_path / 'grafted').eval()(x), grafted(x))


def test_config_of_old_timm(tmp_path):
    """It has no `model_args`, and the entries of `pretrained_cfg` at its root."""
    model, x = timm.create_model('test_vit', num_classes=3).eval(), torch.randn(1, 3, 160, 160)
    hub.save(model, tmp_path / 'model')
    file = tmp_path / 'model' / 'config.json'
    config = {
        **json.loads(file.read_text())['pretrained_cfg'], 'architecture': 'test_vit', 'num_classes': 3,
        'fixed_input_size': True}
    file.write_text(json.dumps(config))
    assert torch.equal(hub.load(tmp_path / 'model').eval()(x), model(x))
    file.write_text(json.dumps({**config, 'num_classes': 4}))
    with pytest.raises(ValueError, match='has num_classes=4 and label_offset=0, but model.safetensors has 3 classes'):
        hub.load(tmp_path / 'model')


def test_loading_draws_nothing(saved):
    state = torch.get_rng_state()
    timm.create_model(f'local-dir:{saved[0]}', pretrained=True)
    expected = torch.rand(1)
    torch.set_rng_state(state)
    hub.load(saved[0])
    assert torch.equal(torch.rand(1), expected)


def test_other_threads_build_models(saved):
    """The check of a folder counts only the tensors of its own thread."""
    ended, failed = threading.Event(), []

    def build():
        while not ended.is_set():
            try:
                timm.create_model('vit_base_nope', depth=100, device='meta')
            except BaseException as e:
                failed.append(e)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(5):
            hub.load(saved[0])
    finally:
        ended.set()
        thread.join()
    assert not failed


def test_wrong_folders(saved, tmp_path, monkeypatch):
    folder = tmp_path / 'model'

    def expect(message, name=folder):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            hub.load(name)
        assert '\n' not in str(error.value)

    expect(f'There is no folder {folder}.')
    expect(f'There is no folder {folder}.', f'local-dir:{folder}')
    expect(f"'{folder}' is neither an existing folder nor OWNER/NAME of a repository.", str(folder))
    expect("'model' is neither an existing folder nor OWNER/NAME of a repository.", 'model')
    folder.with_suffix('.pth').touch()
    expect(f"Create the model with checkpoint_path='{folder}.pth', then timm_sape.hub.save it.", f'{folder}.pth')
    monkeypatch.chdir(folder.parent)
    name = folder.with_suffix('.pth').name
    expect(f"'{name}' is a file.", name)
    folder.mkdir()
    expect(f'{folder} has no config.json.')
    text = (saved[0] / 'config.json').read_text()
    (folder / 'config.json').write_text(text)
    torch.save(saved[1].state_dict(), folder / 'pytorch_model.bin')
    expect(f'{folder} has no model.safetensors. Pickles, which can execute code, are not read. Save the model by')
    weights = (saved[0] / 'model.safetensors').read_bytes()
    (folder / 'model.safetensors').write_bytes(weights[:-1])
    expect(f'{folder}: model.safetensors is not what config.json says it is, by its checksum: it was cut off, damaged')
    assert (folder / 'model.safetensors').exists()  # it is the user's file, not in a cache
    config = json.loads(text)
    del config['timm_sape']['sha256']
    (folder / 'config.json').write_text(json.dumps(config))
    expect(f'{folder}: Cannot read the checkpoint model.safetensors. Is it cut off? (')
    config['timm_sape']['version'] = '99.0'
    (folder / 'config.json').write_text(json.dumps(config))
    expect(f'{folder} was written by timm-sape 99.0, newer than {timm_sape.__version__}, which is installed: pip')


# ---- entries of config.json

def changed(config, path, value):
    """A copy of the config with another value of an entry, or without the entry if the value is `...`."""
    config = copy.deepcopy(config)
    inner, names = config, path.split('.')
    for name in names[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[names[-1]]
    else:
        inner[names[-1]] = value
    return config


@pytest.mark.parametrize('path, value, message', [
    ('architecture', 3, 'architecture of config.json must be a string, not 3.'),
    ('architecture', ..., 'config.json has no architecture.'),
    ('architecture', 'vit_of_tomorrow', "is a 'vit_of_tomorrow', which neither timm"),
    ('num_classes', '7', "num_classes of config.json must be an integer of 0 or more, not '7'."),
    ('num_classes', 9, 'config.json has num_classes=9 and label_offset=0, but model.safetensors has 7 classes.'),
    ('model_args', None, 'model_args of config.json must be a mapping, not None.'),
    ('model_args', ..., 'config.json describes another model than model.safetensors: '),
    ('model_args.img_size', [48], 'model_args.img_size of config.json must be an integer from 1 to 20,000, or two'),
    ('model_args.img_size', 96, 'model_args.img_size of config.json is 96. config.json describes another model than'),
    ('model_args.patch_size', 8, 'model_args.patch_size of config.json is 8. config.json describes another model than'),
    ('model_args.num_heads', 'x', "model_args.num_heads of config.json is 'x'. num_heads must be an integer of at"),
    ('model_args.mlp_ratio', {}, 'model_args.mlp_ratio of config.json is {}. TypeError'),
    ('model_args.global_pool', 3, 'model_args.global_pool of config.json is 3. AssertionError'),
    ('model_args.warp', 9, 'model_args.warp of config.json is 9. TypeError: '),
    ('model_args.device', 'meta', "model_args.device of config.json must be left out, not 'meta'."),
    ('model_args.pos_enc', 3, "make its position encoding. (pos_enc must be a string such as 'ape+sape2_k', got 3.)"),
    ('model_args.pos_enc', 'warp9', "position encoding. (Unknown position encoding 'warp9'. If it is your own, "),
    ('model_args.pos_enc_kwargs', [3], 'pos_enc_kwargs must map parts to their keywords'),
    ('model_args.ref_grid_size', 'x', 'ref_grid_size must be (H, W) in patches, two Python ints from 1 to'),
    ('model_args.embed_dim', float('nan'), 'model_args.embed_dim of config.json is nan, which no model has.'),
    ('pretrained_cfg', 3, 'pretrained_cfg of config.json must be a mapping, not 3.'),
    ('pretrained_cfg', ..., 'config.json has no pretrained_cfg.'),
    ('pretrained_cfg.input_size', [3, 48], 'pretrained_cfg.input_size of config.json must be [channels, height, '),
    ('pretrained_cfg.mean', 'x', "pretrained_cfg.mean of config.json must be a list of numbers, not 'x'."),
    ('pretrained_cfg.classifier', 3, 'pretrained_cfg.classifier of config.json must be a name, a list of names, '),
    ('pretrained_cfg.warp', 9, 'pretrained_cfg.warp of config.json is 9. TypeError'),
    ('pretrained_cfg.label_offset', 1, 'has num_classes=7 and label_offset=1, but model.safetensors has 7 classes.'),
    ('timm_sape', None, 'timm_sape of config.json must be a mapping, not None.'),
    ('timm_sape.version', 3, 'timm_sape.version of config.json must be a string, not 3.'),
    ('timm_sape.sha256', 3, 'timm_sape.sha256 of config.json must be a string, not 3.'),
])
def test_wrong_entries(path, value, message, config):
    right, load = config
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(changed(right, path, value))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('path, value, message', [
    ('model_args.embed_dim', 10 ** 9, 'model_args.embed_dim of config.json is 1000000000, which no model has.'),
    ('model_args.embed_dim', 10 ** 6, 'than model.safetensors. Its largest number is model_args.embed_dim=1000000.'),
    ('model_args.depth', 10 ** 6, 'model_args.depth of config.json must be an integer from 1 to 1,000, not 1000000.'),
    ('model_args.depth', 1000, 'far larger than model.safetensors. Its largest number is model_args.depth=1000.'),
    ('model_args.reg_tokens', 10 ** 6, 'model_args.reg_tokens of config.json is 1000000. config.json describes an'),
    ('model_args.img_size', 10 ** 6, 'model_args.img_size of config.json must be an integer from 1 to 20,000, or'),
    ('model_args.img_size', 20_000, 'model_args.img_size of config.json is 20000. config.json describes another model'),
    ('model_args.in_chans', 10 ** 6, 'than model.safetensors. Its largest number is model_args.in_chans=1000000.'),
    ('pretrained_cfg.input_size', [3, 10 ** 6, 10 ** 6], 'pretrained_cfg.input_size of config.json must be ['),
])
def test_sizes_that_no_memory_holds(path, value, message, config, monkeypatch):
    """They are refused fast, and nothing of this size is built."""
    right, load = config
    monkeypatch.setattr(timm.models._builder, 'load_pretrained', lambda *args, **kwargs: pytest.fail('built'))
    start, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=re.escape(message)):
        load(changed(right, path, value))
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 5e5  # kB


@pytest.mark.parametrize('text, message', [
    ('[1, 2]', 'all of config.json must be a mapping, not [1, 2].'),
    ('{"architecture": ', 'config.json is not JSON (JSONDecodeError'),
    ('', 'config.json is not JSON (JSONDecodeError'),
    ('[' * 100_000, 'config.json is not JSON (RecursionError'),
    ('{"architecture": "test_vit_nope", "a": ' + '[' * 500 + ']' * 500 + '}', 'is nested too deeply, at a.0.0.0.0'),
])
def test_texts_that_are_no_config(text, message, config):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        config[1](text)
    assert '\n' not in str(error.value)


def test_weights_of_stock_timm(saved, tmp_path):
    """Without our entry in the config, shapes may differ, because timm adapts some. Absurd sizes are still refused."""
    config = json.loads((saved[0] / 'config.json').read_text())
    del config['timm_sape']
    config['model_args']['patch_size'] = 8
    (tmp_path / 'config.json').write_text(json.dumps(config))
    save_file(load_file(saved[0] / 'model.safetensors'), tmp_path / 'model.safetensors')
    assert hub.load(tmp_path).patch_embed.proj.weight.shape[-1] == 8
    config['model_args']['depth'] = 1000
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match='describes a model far larger than model.safetensors'):
        hub.load(tmp_path)


def test_an_encoding_that_cannot_be_built_without_numbers(tmp_path):
    """If an encoding cannot be built on the meta device, the check there is skipped."""
    class Stubborn(timm_sape.PositionEncoding):
        per_layer = False

        def __init__(self, **host):
            super().__init__(**host)
            self.value = torch.ones(1).item()

        def embed(self, x, grid):
            return x.new_tensor(self.value)

    from common import registered
    with registered(stubborn=Stubborn):
        model = timm.create_model('test_vit_nope', pos_enc='stubborn', num_classes=3)
        hub.save(model, tmp_path / 'model')
        assert hub.load(tmp_path / 'model').encodings['stubborn'].value == 1


def test_command_line(saved, config):
    right, _ = config
    (saved[0] / 'config.json').write_text(json.dumps(changed(right, 'pretrained_cfg.mean', 3)))
    with pytest.raises(ValueError, match='pretrained_cfg.mean of config.json must be a list of numbers, not 3'):
        load_model(str(saved[0]))


# ---- fuzz

DEEP = 'a list in a list in a list ...'
WRONG = [
    None, True, False, -1, 0, 1.5, -1e300, 10 ** 6, 10 ** 9, 10 ** 40, float('nan'), float('inf'), 'x', '7', [], [[]],
    [1, 2, 3, 4], ['x', None], {}, {'a': 1}, DEEP]


def paths_of(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from paths_of(item, (*path, key))


def mutated(config, rng):
    """A config in which one to three entries are removed, have another type, or are added in wrong places."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        *outer, last = rng.choice([path for path in paths_of(config) if path])
        inner = config
        for key in outer:
            inner = inner[key]
        how = rng.choice(['replace', 'replace', 'replace', 'delete', 'wrap', 'add'])
        if how == 'delete':
            del inner[last]
        elif how == 'add' and isinstance(inner, dict):
            inner[f'{last}_'] = rng.choice(WRONG)
        else:
            inner[last] = rng.choice([[inner[last]], {'a': inner[last]}] if how == 'wrap' else WRONG)
    return config


@pytest.mark.parametrize('seed', [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
def test_fuzz(seed, saved, config):
    """The result is the same model or a ValueError of one line, never another exception or another model."""
    right, load = config
    outcomes = {'same': 0, 'refused': 0}
    for i in range(50):
        rng = random.Random(1000 * seed + i)
        wrong = mutated(right, rng)
        text = json.dumps(wrong).replace(f'"{DEEP}"', '[' * 1500 + ']' * 1500)
        try:
            loaded = load(text)
        except ValueError as e:
            assert '\n' not in str(e) and 20 < len(str(e)) < 1200, text
            assert str(e).startswith(str(saved[0])), text
            outcomes['refused'] += 1
        else:
            assert_same(loaded, saved[1])
            outcomes['same'] += 1
    assert min(outcomes.values()) >= 3
