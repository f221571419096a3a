"""Measure how much the logits of timm's ViTs change when encodings are grafted onto them. Prints CSV.

    python .ci/graft_table.py > results/grafts.csv

The models have depth 2 and random weights, and images have 4 x 6 patches. The column `refused` says why a model cannot
be grafted. Models larger than ViT-L are left out, because they consist of the same modules, and so are models that
differ from another one only in their image size.
"""
import csv
import sys

import timm
import torch
from timm.models import is_model_in_modules
from tqdm import tqdm

import timm_sape
from timm_sape.lab.machine import about

MODULES = ('deit', 'vision_transformer', 'vision_transformer_hybrid', 'vision_transformer_relpos', 'vitamin')
ENCODINGS = ('sape2_k', 'rope2d_mixed', 'irpe_qkv')
LARGEST = 3e7  # largest number of parameters at depth 2


def make(name, **kwargs):
    return timm.create_model(name, num_classes=10, **({} if 'vitamin' in name else {'depth': 2}), **kwargs)


def kind(model):
    flags = [getattr(model, flag, None) for flag in ('global_pool', 'no_embed_class', 'pool_include_prefix')]
    return f'{model} {[name for name, _ in model.named_parameters()]} {flags}'


def base(name, dtype):
    stride = make(name, device='meta').patch_embed.feat_ratio(as_scalar=False)
    model = make(name, img_size=[4 * stride[0], 6 * stride[1]], dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model.eval()


def differences(name, encodings, dtype):
    """For each encoding, yield the largest difference of logits and '', or '' and why it cannot be grafted."""
    torch.manual_seed(0)
    model = base(name, dtype)
    x = torch.randn(2, 3, *model.patch_embed.img_size, dtype=dtype)
    for pos_enc in encodings:
        try:
            with torch.no_grad():
                yield f'{(timm_sape.graft(model, pos_enc)(x) - model(x)).abs().max().item():.1e}', ''
        except ValueError as e:
            yield '', str(e)


def main():
    names = [name for name in timm.list_models() if is_model_in_modules(name, MODULES)]
    names += timm.list_models('vit_*_patch16_rope*')
    out = csv.writer(sys.stdout, lineterminator='\n')
    out.writerow(('base', 'grafted', 'float32', 'float64', 'refused', 'notes'))
    notes = f'random weights; {about(torch.device("cpu"))}'
    models = {name: make(name, device='meta') for name in names}
    models = {name: m for name, m in models.items() if sum(p.numel() for p in m.parameters()) < LARGEST}
    names = sorted({kind(model): name for name, model in reversed(models.items())}.values())
    for name in tqdm(names):
        # rotary models already have a rotation
        encodings = ['rpb' if 'rope' in name and 'rope' in encoding else encoding for encoding in ENCODINGS]
        columns = [list(differences(name, encodings, dtype)) for dtype in (torch.float32, torch.float64)]
        for encoding, (single, _), (double, reason) in zip(encodings, *columns):
            out.writerow((name, encoding, single, double, reason, notes))
        sys.stdout.flush()


if __name__ == '__main__':
    main()
