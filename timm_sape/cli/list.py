"""`timm-sape list`: the encodings and the models that there are."""
import argparse
import sys
from typing import Sequence

from .common import CommandError, add_command
from .files import interruptible

__all__ = ['add']

GUIDE = """
Which one? Little has been measured, with small models on CIFAR-10: see results/README.md.
  from scratch           after ten epochs rope2d was ahead of ape at both learning rates tried, and ape+sape2_k at
                         neither; after 40 epochs no lead of rope2d is shown, but lape was ahead of ape, with caveats
  for other resolutions  at twice the size rope2d with resolution='rescale' kept 98 % of its accuracy above chance, ape
                         87 %, rope2d as it is ('extrapolate') 42 %; timm-sape adapt tries every rule of a trained model
  on pretrained weights  timm_sape.graft(NAME, 'rope2d', pretrained=True) starts from the same logits; fine-tuned,
                         rope2d gained little, and sape2_k nothing that is shown

Models are called vit_{tiny,small,base}_{name}, with this encoding alone. vit_{tiny,small,base}_{name}_ape, where there
is one, has timm's learned table too. `timm-sape list models` shows all names. pemix needs another encoding, so there is
only vit_*_pemix_ape; lookhere does not fit 3 heads, so there is no vit_tiny_lookhere. Any other set, and encodings of
your own (--import): timm.create_model('vit_small_pos_enc', pos_enc='ape+rope2d+rpb'). `auto_` before a name adds a
learned gate.
naflexvit_{tiny,small,base}_{name} are the same on timm's NaFlexVit: images of any aspect ratio in one batch, each with
the logits that it has alone (`ope` finds objects only where no patch is missing)."""


def add(commands) -> None:
    parser = add_command(
        commands, 'list', interruptible(_list),
        summary='List the encodings, where each acts and how many parameters it adds, or the models.',
        examples="""\
examples:
  timm-sape list
  timm-sape list 'rope*'
  timm-sape list models '*vit_small_sape2*'
  timm-sape list --import my_encoding.py

Parameters: how many more ViT-S/16 at 224 px has than without position. For the keywords of an encoding, ask
Python: help(timm_sape.get_encoding('rope2d')).""",
    )
    parser.add_argument('what', nargs='?', default='encodings', metavar='encodings|models', help='(default: encodings)')
    parser.add_argument('filter', nargs='?', default='', metavar='PATTERN', help="with wildcards, e.g. 'rope*'")


def _list(args: argparse.Namespace) -> int:
    what, pattern = args.what, args.filter
    if what not in ('encodings', 'models'):
        if pattern:
            raise CommandError(f"'{what}' is neither encodings nor models")
        what, pattern = 'encodings', what

    import timm
    from tqdm import tqdm

    from ..encodings import list_encodings
    from ..grafting import OUR_MODULES
    from ..loading import why_unknown

    if what == 'models':
        names = sorted(
            name for module in OUR_MODULES
            for name in timm.list_models(pattern, module=module, exclude_filters='vit_graft'))  # which needs a base
    else:
        names = list_encodings(pattern, aliases=True)
    if not names:
        why = why_unknown(pattern) if what == 'models' else ''
        raise CommandError(f'no {what} match {pattern!r}; {why or f"`timm-sape list {what}` shows all"}')
    if what == 'models':  # a line as soon as it is known, because all of them take half a minute
        width = max(map(len, names))
        _print_row(('model', 'encoding', 'image', 'parameters'), (width, width, 9))
        for name in names:
            _print_row(_model_row(name), (width, width, 9))
        return 0
    plain = _num_parameters(_create('vit_small_nope'))
    rows = [('name', 'full name', 'acts on', 'attention', 'parameters', 'on another grid')]
    rows += [_encoding_row(name, plain) for name in tqdm(names, desc=what, delay=2, leave=False)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        _print_row(row, widths)
    if not pattern:
        print(GUIDE)
    return 0


def _print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths)]
    print('  '.join([*padded, *cells[len(widths):]]).rstrip(), flush=True)


def _model_row(name: str):
    model = _create(name)
    is_naflex = not hasattr(model, 'patch_embed')
    image = 'any' if is_naflex else '{} x {}'.format(*model.patch_embed.img_size)
    return name, model.pos_enc, image, f'{_num_parameters(model):,}'


def _encoding_row(name: str, plain: int):
    import textwrap

    from ..encodings import get_encoding, list_encodings
    from ..encodings.registry import encoding_title

    cls = get_encoding(name)
    pos_enc = name if cls.alone else f'sincos2d+{name}'  # which has no parameters
    try:
        added = f'{_num_parameters(_create("vit_small_pos_enc", pos_enc=pos_enc)) - plain:,}'
    except Exception as e:  # an encoding of the user's own may not fit this model, or have a bug
        added = '?'
        print(
            f'{name}: its parameters are not counted, because it cannot be built in vit_small on the meta device: '
            f'{type(e).__name__}: {e}', file=sys.stderr)
    canonical = next(other for other in list_encodings() if get_encoding(other) is cls)
    title = encoding_title(name) if name == canonical else f'the same as {canonical}'
    title = textwrap.shorten(title, 60, placeholder=' ...')
    return name, title, ', '.join(cls.acts_on()) or 'nothing', cls.attention_kernel(), added, cls.on_other_grids


def _create(name: str, **kwargs):
    import timm
    import torch

    if 'naflexvit' not in name:
        kwargs['weight_init'] = 'skip'  # init takes long even on 'meta', but timm's NaFlexVit has no such mode
    with torch.device('meta'):
        return timm.create_model(name, **kwargs)


def _num_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())
