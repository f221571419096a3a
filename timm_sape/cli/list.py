"""`timm-sape list`: what there is."""
import argparse

from .common import CommandError, add_command

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'list', _list,
        summary='List the encodings, where each acts and what it costs in parameters, or the models.',
        examples="""\
examples:
  timm-sape list
  timm-sape list 'rope*'
  timm-sape list models 'vit_small_sape2*'

Parameters are those that ViT-S/16 at 224 has more than without position. Any encodings combine by
pos_enc='ape+rope2d+rpb', and `auto_` before a name gives it a learned gate.""",
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

    from ..encodings import get_encoding, list_encodings

    if what == 'models':
        names = sorted(
            name for module in ('vit_pos_enc', 'grafting')
            for name in timm.list_models(pattern, module=module, exclude_filters='vit_graft'))  # which wants a base
        rows = [('model', 'encoding', 'image', 'parameters')]
    else:
        names = list_encodings(pattern, aliases=True)
        rows = [('name', 'acts on', 'attention', 'parameters', 'on another grid')]
    if not names:
        raise CommandError(f'no {what} match {pattern!r}; `timm-sape list {what}` shows all')
    plain = _num_parameters(_create('vit_small_nope'))
    for name in tqdm(names, desc=what, delay=2, leave=False):
        if what == 'models':
            model = _create(name)
            height, width = model.patch_embed.img_size
            rows.append((name, model.pos_enc, f'{height} x {width}', f'{_num_parameters(model):,}'))
        else:
            cls = get_encoding(name)
            pos_enc = name if cls.alone else f'sincos2d+{name}'  # which has no parameters
            added = _num_parameters(_create('vit_small_nope', pos_enc=pos_enc)) - plain
            acts_on = ', '.join(cls.acts_on()) or 'nothing'
            rows.append((name, acts_on, cls.attention_kernel(), f'{added:,}', cls.resolution))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 0


def _create(name: str, **kwargs):
    import timm
    import torch

    with torch.device('meta'):
        return timm.create_model(name, weight_init='skip', **kwargs)  # init takes long even on 'meta'


def _num_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())
