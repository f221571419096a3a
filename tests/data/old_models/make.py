"""Write the models of this folder: `python tests/data/old_models/make.py`, last run at commit 4f13f36.

A version from before the package was rearranged wrote the files, and `tests/test_old_models.py` loads them with the
current one. So do not run this again to make a failing test pass: differences are what the test is meant to find.

Only the public API is used. The models share one backbone, so each entry of a backbone is stored once.
"""
import hashlib
import json
import tempfile
import zlib
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save_file

import timm_sape

HERE = Path(__file__).parent
SHAPE = dict(img_size=(24, 40), patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3)
OTHER_SIZE = 32, 48
COMPOSITIONS = (
    'ape+sape2_k', 'ape+rope2d_mixed', 'ape+auto_rope2d+auto_sape2_k', 'cope+rope2d+sape2_qk', 'ape2d+pemix',
    'cape+pemix', 'auto_fourier+auto_rpb', 'auto_peg', 'auto_t5', 'auto_lape', 'irpe_qkv+sape2_q', 'pape+rope2d')
VARIANTS = {
    'rope2d': {'resolution': 'rescale'},
    'mrope': {'section': [2, 1, 1]},
    'sincos2d': {'resolution': 'rescale'},
    'alibi2d': {'distance': 'manhattan', 'resolution': 'rescale'},
    'cope': {'direction': 'between', 'npos': 8},
    'sape2_k': {'preset': 'equations', 'bias_scale': 'learned', 'npos': 4},
    'sape2_qk': {'gate_scale': 0.5, 'bias_scale': -1.0},
    'sape2sq_k': {'bias_scale': 0.1},
    'shaw': {'distance': 'raster'},
    't5': {'distance': 'raster'},
    'irpe_k': {'method': 'cross', 'shared_heads': False},
    'irpe_q': {'mode': 'bias', 'method': 'euclidean'},
    'irpe_qk': {'method': 'quantized', 'ratio': 3},
    'cpb': {'mode': 'cr', 'hidden': 16},
    'ape2d': {'combine': 'concat'},
    'fourier': {'gamma': 1.0, 'features': 8, 'hidden': 16},
    'pape': {'num_parabolas': 4, 'resolution': 'rescale'},
    'peg': {'kernel_size': 5},
    'rpe2d': {'slopes': 'code', 'diagonal': True},
    'rope_dinov3': {'normalize': 'max', 'base': 10.0},
}
# base, the encoding grafted onto it, and what makes the base small
BASES = {
    'plain': ('vit_small_patch16_224', 'sape2_k', {}),
    'plain_twice': ('vit_small_patch16_224', 'rope2d+shaw', {}),
    'registers': ('vit_small_patch14_reg4_dinov2', 'rope2d', {}),
    'clip': ('vit_base_patch16_clip_224', 'rpb', {}),
    'distilled': ('deit_small_distilled_patch16_224', 'sape2_k', {}),
    'norm_after': ('vit_relpos_base_patch32_plus_rpn_256', 'irpe_k', {'img_size': 32}),
    'relpos': ('vit_relpos_small_patch16_224', 'sape2_k', {}),
    'relpos_shared': ('vit_srelpos_small_patch16_224', 'cope', {}),
    'rotary': ('vit_small_patch16_rope_224', 'sape2_k', {}),
    'rotary_mixed_ape': ('vit_small_patch16_rope_mixed_ape_224', 'shaw', {}),
    'converted': ('vit_small_patch16_rope_mixed_224', 'nope', {}),
}


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Give each parameter large values that depend only on its name and shape."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith('gate.weight'):
            p.copy_(0.01 + 0.002 * noise)
        elif p.ndim < 2 or p.min() == p.max():
            p.add_(noise, alpha=0.2)
        else:
            p.copy_(noise * (0.3 if 'encodings.' in name else p[0].numel() ** -0.5))


def images(height: int, width: int) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')
    waves = [(0.3 * y + 0.1 * x).sin(), (0.07 * x * y).cos(), (0.2 * x).sin()]
    return torch.stack([torch.stack(waves), torch.stack(waves).flip(1)])  # [2, 3, height, width]


def main() -> None:
    encodings = {f'test_vit_{name}': {} for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).alone}
    models = {name: (name, {}) for name in encodings}
    models.update({
        f'test_vit_{name}-keywords': (f'test_vit_{name}', {'pos_enc_kwargs': {name: keywords}})
        for name, keywords in VARIANTS.items()})
    models.update({name: ('test_vit_ape', {'pos_enc': name}) for name in COMPOSITIONS})
    models.update({f'graft-{name}': ('vit_graft', {'base': base, 'pos_enc': pos_enc, **kwargs})
                   for name, (base, pos_enc, kwargs) in BASES.items()})

    blobs, index, logits = {}, {}, {}
    for name, (architecture, kwargs) in models.items():
        model = timm.create_model(architecture, **{**SHAPE, **kwargs}).eval()
        randomize(model)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, 'saved')
            timm_sape.hub.save(model, folder)
            config = json.loads((folder / 'config.json').read_text())
            state = load_file(folder / 'model.safetensors')
        assert state.keys() == model.state_dict().keys()
        entries = {}
        for key, value in state.items():
            content = value.numpy().tobytes() + str((value.dtype, value.shape)).encode()
            entries[key] = hashlib.sha256(content).hexdigest()[:16]
            blobs[entries[key]] = value
        index[name] = {'config': config, 'entries': entries}
        with torch.no_grad():
            own = model.patch_embed.img_size
            logits[name] = model(images(*own))
            if not architecture == 'vit_graft':
                model.set_input_size(img_size=OTHER_SIZE)
                logits[f'{name}/other size'] = model(images(*OTHER_SIZE))
    save_file(blobs, HERE / 'entries.safetensors')
    save_file(logits, HERE / 'logits.safetensors')
    lines = (f'{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}' for name, entry in index.items())
    (HERE / 'models.json').write_text('{\n' + ',\n'.join(lines) + '\n}\n')
    print(f'{len(index)} models, {len(blobs)} entries')


if __name__ == '__main__':
    main()
