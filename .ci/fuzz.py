"""Throw odd input at the package, by a seed: what comes back is a right result or a plain refusal.

    python .ci/fuzz.py [--inputs 3000] [--seed 0] [--first 0]

A right result has the right shape and dtype, is finite where the input is, is the same again, and is what references or
other ways to the same thing compute. A plain refusal is a ValueError of ours: one line that says what to do. All else
is a finding: other exceptions, hangs, memory beyond a few GB, half-written files. Each is printed with the number I of
its input, which `--first I --inputs 1` repeats.
"""
import argparse
import copy
import faulthandler
import inspect
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in (
    '', 'tests', 'tests/encodings', 'tests/naflex')]
from hub_server import serve  # noqa: E402

SERVING = serve('token')
HUB = SERVING.__enter__()  # before what follows reads its address
os.environ.update(
    OMP_NUM_THREADS='1', HF_ENDPOINT=HUB.url, HF_HUB_OFFLINE='0', HF_HUB_DISABLE_XET='1', HF_HUB_DISABLE_TELEMETRY='1',
    HF_HUB_DISABLE_PROGRESS_BARS='1')
import odd_input as odd  # noqa: E402
import odd_moments as moments  # noqa: E402
import reference_sape2  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from batches import batch, pictures  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from test_hub_configs import DEEP, assert_same, mutated  # noqa: E402

import timm_sape  # noqa: E402
from timm_sape import hub  # noqa: E402
from timm_sape.functional import sape2_bias  # noqa: E402

SECONDS, BYTES = 30, 6 * 2 ** 30  # for one input; beyond what the imports take
SMALL = dict(img_size=(16, 24), patch_size=8, embed_dim=16, num_heads=2, depth=2, num_classes=3)


class Hang(BaseException):
    """An input takes too long."""


def functions(rng, folder):
    """`timm_sape.functional`, against plain loops in float64."""
    name, args = rng.choice(['sape2_attention', 'sape2_attention', 'sape2_bias']), odd.functional_args(rng)
    if name == 'sape2_bias':
        args = {key: value for key, value in args.items() if key in inspect.signature(sape2_bias).parameters}
    function = getattr(timm_sape.functional, name)
    found = odd.attempt(function, **odd.mutate(rng, args, more=odd.other_tensor))
    q, tensors = args['q'], [x for x in args.values() if isinstance(x, torch.Tensor)]
    assert found.shape == (args['v'].shape if 'v' in args else (*q.shape[:3], q.shape[2]))
    assert found.is_meta == q.is_meta and ('v' not in args or found.dtype == args['v'].dtype)
    ordinary = odd.is_finite(*tensors) and not any(x.double().abs().sum() > 1e4 for x in tensors if not x.is_meta)
    if found.is_meta or args.get('dropout_p') or not ordinary:
        return
    assert odd.is_finite(found) and torch.equal(function(**args), found)
    if found.numel():
        args = {key: value for key, value in args.items() if key not in ('backend', 'dropout_p')}
        wide = {key: x.double() if key in ('q', 'k', 'v', 'table_x', 'table_y') else x for key, x in args.items()}
        expected = getattr(reference_sape2, name)(**wide)
        error = (found - expected).nan_to_num(0).abs().max()  # NaN where their exponentials overflow
        narrow = any(x.is_floating_point() and x.dtype.itemsize < 4 for x in tensors)
        assert error <= (0.2 if narrow else 1e-3) * max(1, expected.nan_to_num(0).abs().max())


def use(rng, model):
    """Run a model on images of its size or of another, with kept patches, objects or a mask, right or odd."""
    size = model.eval().patch_embed.img_size
    if math.prod(size) + 100 * model.num_prefix_tokens > 10 ** 5 or sum(p.numel() for p in model.parameters()) > 1e8:
        return  # too large to be quick
    if rng.random() < (0.1 if model.patch_embed.strict_img_size else 0.5):
        size = rng.choice([8, 16, 17, 40]), rng.choice([8, 24, 32])
    patches = math.prod(-(-s // p) for s, p in zip(size, model.patch_size))
    x, n = torch.randn(2, 3, *size).to(next(model.parameters())), patches + model.num_prefix_tokens
    given = {'keep_indices': torch.tensor([rng.sample(range(patches), max(1, patches // 2)) for _ in x]),
             'object_index': torch.randint(0, 3, (2, patches)), 'attn_mask': torch.randn(n, n).to(x.dtype)}
    given = {name: given[name].to(x.device) for name in rng.sample([*given], rng.choice([0, 0, 1]))}
    given = {name: rng.choice([v, odd.other_tensor(rng, v), rng.choice(odd.ODD)]) for name, v in given.items()}
    with torch.no_grad():
        found = odd.attempt(model, x, **given)
        assert found.shape == (2, model.num_classes) and found.is_meta == x.is_meta
        if x.is_meta or not odd.is_finite(*given.values(), *model.parameters()):
            return
        assert odd.is_finite(found) and torch.equal(model(x, **given), found)
        if 'attn_mask' not in given:
            alone = model(x[:1], **{name: v[:1] if isinstance(v, torch.Tensor) else v for name, v in given.items()})
            assert (alone - found[:1]).abs().max() < (0.2 if x.dtype.itemsize < 4 else 1e-3), 'sees the batch'


def strings(rng, folder):
    """`pos_enc` and `pos_enc_kwargs`; what a model says it was made with makes it again."""
    names = rng.sample(timm_sape.list_encodings(aliases=True), rng.choice([1, 1, 1, 1, 2, 2, 3]))
    names += [rng.choice(['', 'Rope2d', 'sape', 'ape, rope2d', 'nope', 'auto_', 'é', 'x' * 300])] * (rng.random() < 0.1)
    parts = [rng.choices(['', 'auto_', 'auto_auto_'], [9, 3, 0.3])[0] + name for name in names]
    values = [
        rng.choice(odd.ODD), 'rescale', 'extrapolate', 'ntk', 'yarn', 'slopes', 'learned', 'equations', [0.5, 2], 0.5,
        1.5, 4, 7, 1e4, 1e-9]
    kwargs = {}
    for part, name in zip(parts, names):
        known = [*timm_sape.encoding_keywords(name)] * 4 if name in timm_sape.list_encodings() else []
        picked = rng.sample([*known, 'resolution', 'init', 'dim', 3], rng.choice([0, 0, 1, 1, 2]))
        kwargs.update({part: {keyword: rng.choice(values) for keyword in picked}} if picked else {})
    given = {'pos_enc': rng.choice(['+', '+', ' + ']).join(parts), 'pos_enc_kwargs': kwargs}
    if rng.random() < 0.1:
        given[rng.choice([*given])] = rng.choice([*odd.ODD, {'ape': {}}, {'rope2d': {'resolution': 'rescale'}}])
    model = odd.attempt(timm.create_model, 'test_vit_pos_enc', **SMALL, **given)
    again = timm.create_model('test_vit_pos_enc', **json.loads(json.dumps(model._model_args)))
    again.load_state_dict(model.state_dict())
    use(rng, again)


def models(rng, folder):
    """Arguments of `create_model`, and of `set_input_size`."""
    kwargs = dict(
        SMALL, pos_enc=rng.choice([*timm_sape.list_encodings(), 'ape+sape2_k', 'ape+rope2d+rpb', 'auto_rope2d+cope']),
        img_size=rng.choice([16, 24, (16, 24), [24, 16]]), patch_size=rng.choice([4, 8, 8, (8, 4)]),
        num_heads=rng.choice([1, 2, 4]), reg_tokens=rng.choice([0, 1, 4]), ref_grid_size=rng.choice([None, (3, 2)]),
        dynamic_img_size=rng.choice([False, True]), dynamic_img_pad=rng.choice([False, False, True]),
        logit_scaling=rng.choice(['constant', 'log']), patch_drop_rate=0.)
    sizes = [5, (8, 8, 8), '16', [16, 24], (16, '24'), (16., 24.), (16, 10 ** 6)]
    odd.mutate(rng, kwargs, kwargs.keys() - {'num_classes'}, lambda rng, value: rng.choice(sizes))
    kwargs.update(rng.choice([{}] * 16 + [
        {'device': 'meta'}, {'dtype': torch.float64}, {'dtype': torch.bfloat16},
        {'pos_enc': 'rope2d', 'resolution': 'rescale'}]))
    model = odd.attempt(timm.create_model, 'test_vit_pos_enc', **kwargs)
    if rng.random() < 0.3:
        odd.attempt(model.set_input_size, **odd.mutate(rng, {'img_size': (24, 32), 'patch_size': None}))
    use(rng, model)


def patches(rng, folder):
    """Batches of patches with coordinates, right or odd: each image gets what it gets without padding and others."""
    torch.manual_seed(rng.randrange(2 ** 32))
    pos_enc = rng.choice([*timm_sape.list_encodings(), 'ape+sape2_k', 'auto_rope2d+cope'])
    model = odd.attempt(timm.create_model, 'test_naflexvit_pos_enc', pos_enc=pos_enc, **SMALL).eval()
    sizes = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
    given = batch(pictures(sizes, torch.float32), padding=rng.choice([0, 2]), permute=rng.random() < 0.5)
    odd.mutate(rng, given, [*given, 'grid_size', 'attn_mask', 'keep_indices'], odd.other_tensor)
    x = given['patches']
    if isinstance(x, torch.Tensor) and x.is_floating_point():  # torch itself refuses other dtypes, as of images
        given['patches'] = x.float() if not x.is_meta else torch.zeros(x.shape)
    with torch.no_grad():
        found = odd.attempt(model, given)
        if found.is_meta or not odd.is_finite(given['patches']):
            return
        assert found.shape == (len(given['patches']), model.num_classes) and odd.is_finite(found)
        for i, logits in enumerate(found if {*given} == {'patches', 'patch_coord', 'patch_valid'} else ()):
            valid = slice(None) if given.get('patch_valid') is None else given['patch_valid'][i].bool()
            one = {name: x[i, valid][None] for name, x in given.items() if name in ('patches', 'patch_coord')}
            scale = max(1, logits.abs().max())
            assert (model(one) - logits).abs().max() < 1e-3 * scale, 'sees other images or padding'


def configs(rng, folder):
    """`hub.load` of a folder with odd entries in its config.json, or with damaged files."""
    (model, source), place = moments.saved(rng, folder), moments.new_folder(folder) / 'model'
    shutil.copytree(source, place)
    config = json.loads((place / 'config.json').read_text())
    config = json.dumps(mutated(config, rng) if rng.random() < 0.8 else config)
    (place / 'config.json').write_text(config.replace(f'"{DEEP}"', '[' * 1500 + ']' * 1500))
    if rng.random() < 0.2:
        odd.damage(rng, place / rng.choice(['config.json', 'model.safetensors']))
    assert_same(odd.attempt(hub.load, rng.choice([str(place), place, f'local-dir:{place}'])), model)


def saving(rng, folder):
    """`hub.save` with odd descriptions and places. It does not change the model, and leaves all or nothing."""
    model, _ = moments.saved(rng, folder)
    place = moments.new_folder(folder) / rng.choice(['a', 'a b', 'é', 'x' * 300, '.', 'a/b'])
    given = dict(repo_id=None, recipe='r', data=['d'], results={'top-1': 1.5}, model_card=None, model_config=None)
    before = copy.deepcopy(model.state_dict())
    try:
        odd.attempt(hub.save, model, place, **odd.mutate(rng, given))
    except odd.Refused:
        assert not os.path.isdir(place) or not os.listdir(place)
        raise
    finally:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_same(hub.load(place), model)


def states(rng, folder):
    """State dicts with odd entries, loaded directly, or as a file of pretrained weights, whole or damaged."""
    model, _ = moments.saved(rng, folder)
    state, changes = odd.mutated_state(rng, model.state_dict())
    new, is_whole = timm.create_model('test_vit_pos_enc', **model._model_args), rng.random() < 0.75
    if rng.random() < 0.6:
        is_whole, before = True, copy.deepcopy(new.state_dict())
        try:
            odd.attempt(new.load_state_dict, state, strict=rng.random() < 0.7)
        except odd.Refused as e:  # torch says what is wrong after it has loaded the rest, we say it before
            unchanged = all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
            assert unchanged or isinstance(e.__cause__, RuntimeError)
            raise
    else:
        file = moments.new_folder(folder) / rng.choice(['weights.pth', 'weights.safetensors'])
        if file.suffix == '.pth' or not all(isinstance(x, torch.Tensor) and not x.is_meta for x in state.values()):
            torch.save({'state_dict': state}, file := file.with_suffix('.pth'))
        else:
            save_file({name: x.contiguous().clone() for name, x in state.items()}, file)
        if not is_whole:
            odd.damage(rng, file)
        source = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(file), num_classes=model.num_classes))
        new = odd.attempt(timm.create_model, 'test_vit_pos_enc', **source, **model._model_args)
    if is_whole:
        use(rng, new)
        assert changes or assert_same(new.eval(), model) is None


def outcome(i, seed, folder):
    """The name of an area, and 'right', 'refused', or a finding in words."""
    rng = random.Random(f'{seed}-{i}')
    torch.manual_seed(rng.randrange(2 ** 32))
    area = rng.choices([functions, strings, models, patches, configs, states], [6, 5, 5, 4, 2, 2])[0]
    if i % 25 == 24:  # what takes longer, in turn
        area = [saving, moments.threads, saving, moments.kills, moments.threads, moments.downloads][i // 25 % 6]
    signal.alarm(SECONDS)  # between two lines of Python
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # in the middle of an operator
    try:
        area(rng, folder, *[HUB] * (area is moments.downloads))
        return area.__name__, 'right'
    except odd.Refused:
        return area.__name__, 'refused'
    except (Exception, Hang) as e:
        where = ', '.join(f'{Path(f.filename).name}:{f.lineno}' for f in traceback.extract_tb(e.__traceback__)[-3:])
        return area.__name__, f'{type(e).__name__}: {" ".join(str(e).split())[:300]} ({where})'
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def hang(*_):
    raise Hang(f'longer than {SECONDS} s')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (('inputs', 3000), ('seed', 0), ('first', 0)):
        parser.add_argument(f'--{option}', type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    signal.signal(signal.SIGALRM, hang)
    pages = int(Path('/proc/self/statm').read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, -1))
    start, counts = time.monotonic(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.first, args.first + args.inputs):
            area, found = outcome(i, args.seed, Path(folder))
            kind = found if found in ('right', 'refused') else 'finding'
            counts[area, kind] += 1
            if kind == 'finding':
                print(f'input {i}, {area}: {found}', flush=True)
    areas = dict.fromkeys(area for area, _ in counts)
    right, refused, findings = (sum(counts[area, kind] for area in areas) for kind in ('right', 'refused', 'finding'))
    print(f'{args.inputs} inputs, seed {args.seed}: {right} results, {refused} refusals, {findings} findings, '
          f'{time.monotonic() - start:.0f} s')
    # where nearly everything is refused, refusals of what is right would not be noticed
    idle = [area for area in areas if counts[area, 'refused'] > 20 * max(counts[area, 'right'], 2)]
    if idle:
        print(f'{", ".join(idle)}: nearly all of the inputs were refused')
    return min(findings + len(idle), 1)


if __name__ == '__main__':
    try:
        sys.exit(main())
    finally:
        SERVING.__exit__(None, None, None)  # its threads would keep this process alive, even after --help
