"""Odd input, and what counts as refusing it plainly: for tests/test_odd_input.py and .ci/fuzz.py."""
import errno
import re
import traceback

import torch

FIX = re.compile(  # what to do, or what would be right
    r'\b(must|use|choose|write|leave|give|check|name|keep|add|resize|known|did you mean|it accepts|create|load|copy|'
    r'call|put|try|no keywords|needs|install|save|sets it|import that first|join)\b', re.IGNORECASE)
NAN, INF = float('nan'), float('inf')
ODD = [
    None, True, False, -1, 0, 1, 2, 3, 1.5, -1e300, 1e30, 10 ** 6, 10 ** 9, 2 ** 63, 10 ** 40, NAN, INF, 1j, '', 'x',
    '7', b'x', [], [[]], [1, 2], (2, 3), (0, 1), (10 ** 9, 1), (3, 3, 3), {}, {'a': 1}, {'a': {}}, object, object(),
    torch.tensor(3), torch.tensor(0.5), torch.zeros(2), torch.float16]


class Refused(Exception):
    """The package, the system or torch has refused, and has said why."""


def attempt(function, *args, **kwargs):
    """What the package returns, or `Refused`."""
    try:
        return function(*args, **kwargs)
    except Exception as e:
        text, frames = str(e), traceback.extract_tb(e.__traceback__)
        of_ours = type(e) in (ValueError, ConnectionError) and '/timm_sape/' in frames[-1].filename
        plain = of_ours and FIX.search(text) and '\n' not in text and 20 < len(text) < 1500
        of_torch = isinstance(e, RuntimeError) and text.startswith('Error(s) in loading state_dict')
        if plain or of_torch or isinstance(e, OSError) and e.errno == errno.ENAMETOOLONG:
            raise Refused(text) from e
        raise


def mutate(rng, args, names=None, more=lambda rng, value: rng.choice(ODD)):
    """Replace some arguments by odd ones."""
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        name = rng.choice(sorted(names or args))
        args[name] = rng.choice([more(rng, args.get(name)), rng.choice(ODD)])
    return args


def other_tensor(rng, x):
    """A tensor like x, but not quite."""
    if not isinstance(x, torch.Tensor):
        return rng.choice(ODD)
    change = rng.choice([
        lambda: x.to('meta'), lambda: x.double(), lambda: x.half(), lambda: x.bfloat16(), lambda: x.long(),
        lambda: x.int(), lambda: x.bool(), lambda: x.to(torch.complex64), lambda: x[0], lambda: x[None], lambda: x[:0],
        lambda: x[..., :0], lambda: x[..., 1:], lambda: x.mT, lambda: x.tolist(), lambda: x * NAN, lambda: x * INF,
        lambda: x * 0, lambda: x + 1, lambda: x - 1, lambda: x + 1000, lambda: x * 1000, lambda: torch.cat([x, x])])
    try:
        return change()
    except (IndexError, NotImplementedError, RuntimeError):  # not for this shape, or without numbers
        return rng.choice(ODD)


def functional_args(rng):
    """Arguments of `sape2_attention` that would do, most of which `sape2_bias` takes too."""
    height, width, p = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([0, 0, 1, 2])
    batch, heads, dim, patches = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2, 5]), height * width
    kept = [rng.sample(range(patches), rng.randint(1, patches))] * batch if rng.random() < 0.5 else None
    n = p + (patches if kept is None else len(kept[0]))
    args = {name: torch.randn(batch, heads, n, dim) for name in ('q', 'k', 'v')}
    args.update(
        table_x=torch.randn(rng.choice([2, 5]), dim), table_y=torch.randn(rng.choice([2, 5]), dim),
        grid_size=(height, width), mode=rng.choice(['q', 'k', 'qk']), num_prefix_tokens=p,
        gate_scale=rng.choice([None, 0.3]), ref_grid_size=rng.choice([None, (2, 2), (3, 1)]),
        keep_indices=None if kept is None else torch.tensor(kept),
        bias_scale=rng.choice([1.0, -0.5, torch.rand(heads)]), scale=rng.choice([None, 0.7]), dropout_p=0.,
        is_causal=rng.choice([False, True]), attn_mask=rng.choice([None, None, torch.randn(n, n)]),
        backend=rng.choice([None, None, 'reference', 'torch']))
    device = rng.choice(['cpu'] * 9 + ['meta'])
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in args.items()}


def is_finite(*values):
    return all(x.is_meta or x.isfinite().all() for x in values if isinstance(x, torch.Tensor))


def damage(rng, file):
    """Cut a file off, or flip a bit."""
    data = bytearray(file.read_bytes())
    place = rng.randrange(rng.choice([len(data), min(200, len(data))]))
    if rng.random() < 0.5:
        del data[place:]
    else:
        data[place] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def mutated_state(rng, state):
    """A state dict with up to two odd entries, and how many."""
    state, changes = {name: value.clone() for name, value in state.items()}, rng.choice([0, 1, 1, 2])
    for _ in range(changes):
        name = rng.choice([name for name in state if name.endswith('_extra_state')] * rng.choice([0, 1]) or [*state])
        how = rng.choice(['drop', 'rename', 'odd', 'other', 'other', 'other'])
        value = state.pop(name) if how in ('drop', 'rename') else state[name]
        if how != 'drop':
            name = rng.choice(['x', f'{name}_', f'model.{name}']) if how == 'rename' else name
            state[name] = rng.choice(ODD) if how == 'odd' else other_tensor(rng, value)
    return state, changes
