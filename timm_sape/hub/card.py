"""The model card, by timm's template."""
import json
from typing import Any, Dict, List

import timm
import torch
import torch.nn as nn
from timm.layers import to_2tuple
from timm.models import model_entrypoint

from ..encodings import get_encoding, parse_pos_enc
from ..encodings.registry import is_built_in
from ..version import __version__

IMPORT = 'import timm_sape  # registers the model: without it, timm says "Unknown model"\n'
USAGE = """```python
import timm
{imports}
model = timm.create_model({source!r}, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
```"""


def make_card(model: nn.Module, config: Dict[str, Any], source: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """The entries that timm makes a card of.

    Args:
        model: The model.
        config: Its config.json.
        source: The name by which `timm.create_model` loads it.
        given: What the user says about it.
    """
    args, cfg = config['model_args'], config['pretrained_cfg']
    details = {
        'Architecture': f'`{config["architecture"]}`',
        'Parameters': f'{sum(p.numel() for p in model.parameters()):,}',
        'Image size': '{} x {}, {} channels'.format(
            *to_2tuple(args.get('img_size') or cfg['input_size'][1:]), cfg['input_size'][0]),
        'Classes': config['num_classes'],
    }
    is_stock = model_entrypoint(config['architecture']).__module__.startswith('timm.models.')
    needs, imports = ('', '') if is_stock else (
        ' It needs the package timm-sape, whose import registers it with timm.', IMPORT)
    if 'pos_enc' in args:
        parts = parse_pos_enc(args['pos_enc'], args.get('pos_enc_kwargs'))
        papers = {name: get_encoding(name).paper for name in parts}
        details['Position encoding'] = [
            f'`{name}`' + (f' {keywords}' if keywords else '') + (f', {papers[name]}' if papers[name] else '')
            for name, keywords in parts.items()]
        by_module: Dict[str, List[str]] = {}
        for cls in map(get_encoding, parts):
            if not is_built_in(cls):
                by_module.setdefault(cls.__module__, []).append(cls.name)  # without `auto_`
                needs += f' Its encoding `{cls.name}` is not part of that package.'
        for module, names in by_module.items():
            what = ', '.join(map(repr, names))
            imports += (
                f'# Register {what} here.\n' if module == '__main__' else f'import {module}  # registers {what}\n')
    of_base = args.get('base_position', 'none')  # what timm's modules compute, which pos_enc does not name
    if of_base != 'none':
        details['Position of the base'] = of_base
    details.update(given)
    details['Arguments'] = f'`{json.dumps(args)}`'
    details['Written by'] = f'timm-sape {__version__}, timm {timm.__version__}, torch {torch.__version__}'
    encoding = f' with the position encoding `{args["pos_enc"]}`' if 'pos_enc' in args else ''
    encoding += f", and its base's own ({of_base})" if of_base != 'none' else ''
    return {
        'tags': ['image-classification', 'timm', 'transformers', *(() if is_stock else ('timm-sape',))],
        'license': cfg.get('license', 'unknown'),
        'description': f'A model for images{encoding}.{needs}',
        'details': details,
        'usage': USAGE.format(source=source, imports=imports),
    }
