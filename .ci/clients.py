"""Runs our models through the packages that people use timm's models with; timm's own plain ViT is the control.

    python .ci/clients.py --install     # the packages, into the environment of this Python
    python .ci/clients.py               # all checks, one process each; writes .ci/clients-result.md
    python .ci/clients.py --host naflexvit     # NaFlexVit, fewer encodings; writes .ci/clients-naflexvit-result.md
    python .ci/clients.py --only peft   # those whose name matches this regular expression; prints the table
    python .ci/clients.py --only peft --sabotage position    # models that are broken on purpose: the columns must fail

To add a client, write a function, decorated with the package's name on PyPI and the feature. It gets a `Make`, which
makes the models of one encoding, and puts one into its client. It raises where that fails, and returns what to compare:

    run               a function of images `[B, 3, 160, 160]`; gives a tensor, which must not depend on the order of
                      patches but through their position (logits, pooled features, norms of gradients)
    run, reference    the same without the client. Both must give the same
    run, reference, tolerance     if rounding of another kind has a part in it
    None              nothing, if it has compared something by itself

or raises `NotApplicable`. The rest is done here: every check runs on the control and on each of `ENCODINGS`.
"""
import argparse
import copy
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_model, save_for_hf

import timm_sape
from timm_sape.lab.machine import commit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'tests'))

from common import randomize  # noqa: E402

CONTROL = 'timm'
ENCODINGS = [
    'ape', 'nope', 'sincos2d', 'rope2d', 'rope2d_mixed', 'sape2_k', 'sape2_k_ape', 'sape2sq_k', 'cope', 'shaw',
    'irpe_qkv', 'rpb', 'cpb', 'fourier', 'lape', 'pape', 'peg', 'alibi2d']
KINDS = ['ape', 'nope', 'rope2d', 'sape2_k', 'irpe_qkv', 'rpb', 'lape', 'pape', 'peg']  # one of each, for NaFlexVit
PATCH = 16
SAME = 1e-4  # relative; float32 differs from float64 by at most 5e-6 here
MOVED = 1e-3  # relative; another order of patches moves the logits of a model with a position by 4e-3 to .5
ROUGH = 0.08  # relative, for activations of eight bits, which differ by .01 to .04. It hides what position does
TIMEOUT = 600  # seconds for one check, all encodings together
CHECKS = []
UNAVAILABLE = {  # by name: why there is no check
    'ToMe': 'is not on PyPI; the package that is called tome there is another one, of Python 2',
}


class NotApplicable(Exception):
    """The feature has nothing to do with this encoding."""


def client(package, feature, why=''):
    """Register a check.

    Args:
        package: The client's name on PyPI.
        feature: What of it is checked.
        why: The cause, if some of our models fail and that is not mended.
    """
    def register(check):
        check.package, check.feature, check.name = package, feature, check.__name__.removeprefix('check_')
        check.why = why
        CHECKS.append(check)
        return check
    return register


@register_model
def test_vit_timm(pretrained=False, **kwargs):
    """timm's plain ViT, as small as our test models. Named after them, so that clients can make it by its name."""
    small = dict(img_size=160, embed_dim=64, depth=2, num_heads=4)
    return timm.create_model('vit_tiny_patch16_224', pretrained=pretrained, **{**small, **kwargs})


@register_model
def test_naflexvit_timm(pretrained=False, **kwargs):
    """timm's NaFlexVit, likewise, with a class token and no registers, as ours."""
    small = dict(
        img_size=160, embed_dim=64, depth=2, num_heads=4, class_token=True, reg_tokens=0, global_pool='token',
        fc_norm=None)
    return timm.create_model('naflexvit_base_patch16_gap', pretrained=pretrained, **{**small, **kwargs})


@torch.no_grad()
def awake(model):
    """Large weights, the same for the same name in every model, so that position weighs."""
    for name, p in randomize(model).named_parameters():
        if 'sape2sq' in name:
            p.mul_(0.3)  # squares of distances as large as these would turn rounding into an error of .1
    return model


class Make:
    """Makes models of one encoding, all on the same host: `make(num_classes=5)`.

    All models that are made with the same arguments have the same large random weights.

    Args:
        encoding: The encoding, or `CONTROL`.
        kwargs: Arguments of all models.
    """

    host = 'vit'  # or 'naflexvit'

    def __init__(self, encoding, **kwargs):
        self.encoding = encoding
        self.name = f'test_{self.host}_{encoding}'
        self.kwargs = kwargs

    def asleep(self, **kwargs):
        """As timm initialises it."""
        return timm.create_model(self.name, **{'global_pool': 'avg', **self.kwargs, **kwargs}).eval()

    def __call__(self, **kwargs):
        return awake(self.asleep(**kwargs))

    def without(self):
        """What makes a model of the same class that has no position in its attention."""
        return self if self.encoding == CONTROL else Make('nope')

    def folder(self, **kwargs):
        """A folder with a model, as our hub.save writes it; a config of timm's save_for_hf is not for transformers."""
        folder = f'{tempfile.mkdtemp()}/model'
        model = self(**kwargs)
        model.pretrained_cfg['crop_pct'] = 1.  # to crop an image would mix its patches
        timm_sape.hub.save(model, folder)
        return folder


def images(seed=0):
    """Images of 10 x 10 patches, `[2, 3, 160, 160]`."""
    return torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(seed))


def as_in_vit(name):
    """The name of a parameter of a NaFlexVit as it is called in a plain ViT."""
    return name.replace('embeds.proj.', 'patch_embed.proj.').removeprefix('embeds.')


def patch_embedding(model):
    return model.embeds.proj if Make.host == 'naflexvit' else model.patch_embed


LABELS = torch.tensor([1, 3])
LR = 0.01


def exchanged(x):
    """The images with their patches in another order."""
    patches = F.unfold(x, PATCH, stride=PATCH)  # [B, 3*16*16, H*W]
    order = torch.randperm(patches.shape[-1], generator=torch.Generator().manual_seed(1))
    return F.fold(patches[..., order], x.shape[-2:], PATCH, stride=PATCH)


def difference(a, b):
    """Largest difference, relative to the largest entry of `b`. NaN if one is not finite."""
    assert a.shape == b.shape, f'{list(a.shape)} instead of {list(b.shape)}'
    if not (a.isfinite().all() and b.isfinite().all()):
        return float('nan')
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def pooled(maps):
    """Feature maps, a list of `[B, C, H, W]`, without their places, `[B, sum of C]`."""
    return torch.cat([m.flatten(2).mean(-1) for m in maps], dim=1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def train(model, optimizer=None):
    """One step of training without any client."""
    optimizer = optimizer or sgd(model)
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(images()), LABELS).backward()
    optimizer.step()
    return model.eval()


def trained_alike(make, trained):
    """What a check of training returns: a model after its step, and the reference. All parameters are compared here."""
    start, reference = make(num_classes=5), train(make(num_classes=5))
    parameters = dict(trained.named_parameters())
    for (name, after), before in zip(reference.named_parameters(), start.parameters()):
        error = ((parameters[name] - before) - (after - before)).abs().max()
        assert error <= 0.01 * (after - before).abs().max() + 1e-6, f'another step of {name}, off by {error:.1e}'
    return trained.eval(), reference


def gradient_norms(gradients):
    """Norms of gradients with a batch dimension, `[B, number of parameters]`; those of no use are zero."""
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients], dim=1)


def gradients_one_by_one(models, xs, labels):
    """The norms of `gradient_norms`, from one backward pass for each triple of a model, images and labels."""
    rows = []
    for model, x, y in zip(models, xs, labels):
        trainable = [p for p in model.parameters() if p.requires_grad]
        loss = F.cross_entropy(model(x), y)
        found = torch.autograd.grad(loss, trainable, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, trainable)])
    return gradient_norms([torch.stack(column) for column in zip(*rows)])


LAYERS = 'cpb', 'fourier', 'peg'  # these have linear layers or convolutions of their own
PRODUCTS = 'sape2_k', 'sape2_k_ape', 'sape2sq_k', 'cope', 'shaw', 'irpe_qkv', 'pape', *LAYERS  # and these products


def check_count(make, count, more):
    """Check operations that a client counts: no fewer than without position, more if the encoding is among `more`."""
    found, least = count(make()), count(make.without()())
    assert found > least if make.encoding in more else found >= least > 0, f'{found:,} operations, nope has {least:,}'


# ---- timm itself


@client('timm', 'model(x), beside float64')
def check_timm_plain(make):
    double = make().double()
    return make(), lambda x: double(x.double()).float()


@client('timm', 'features_only, FeatureGetterNet')
def check_timm_features(make):
    model, reference = make(features_only=True, out_indices=(0, 1)), make()
    return (lambda x: pooled(model(x)),
            lambda x: pooled(reference.forward_intermediates(x, indices=(0, 1), intermediates_only=True)))


@client('timm', "AttentionExtract(method='hook')")
def check_timm_attention_hook(make):
    from timm.layers import set_fused_attn
    from timm.utils import AttentionExtract
    set_fused_attn(False)
    model = AttentionExtract(make(), method='hook')

    def run(x):
        maps = torch.stack(list(model(x).values()), dim=1)  # [B, L, h, N, N]
        assert maps.shape[1] == 2 and (maps.sum(-1) - 1).abs().max() < 1e-4, 'these are no probabilities'
        return maps.flatten(1).sort().values
    return run


@client('timm', "AttentionExtract(method='fx')", why=(
    'torch.fx does not look into our attention, whose steps depend on the grid.'))
def check_timm_attention_fx(make):
    from timm.layers import set_fused_attn
    from timm.utils import AttentionExtract
    set_fused_attn(False)
    model = AttentionExtract(make(), method='fx')
    return lambda x: torch.stack(list(model(x).values()), dim=1).flatten(1).sort().values


@client('timm', 'ModelEmaV3, one step')
def check_timm_ema(make):
    from timm.utils import ModelEmaV3
    model = make(num_classes=5)
    ema = ModelEmaV3(model, decay=0.5)
    ema.update(train(model))
    reference, trained = make(num_classes=5), train(make(num_classes=5))
    with torch.no_grad():
        for p, q in zip(reference.parameters(), trained.parameters()):
            p.lerp_(q, 0.5)
    return ema.module, reference


# ---- torch


@client('torch', 'forward hooks: each module with parameters is called')
def check_torch_hooks(make):
    model, called = make(), set()
    for name, module in model.named_modules():
        module.register_forward_hook(partial(lambda name, *_: called.add(name), name))
    model(images())
    owners = {name for name, module in model.named_modules() if [*module.parameters(recurse=False)]}
    assert owners <= called, f'not called: {", ".join(sorted(owners - called))}'


@client('torch', 'quantize_dynamic')
def check_torch_quantize_dynamic(make):
    return torch.ao.quantization.quantize_dynamic(make(), {nn.Linear}, dtype=torch.qint8), make(), ROUGH


@client('torch', 'FlopCounterMode: as many as nope, and the products of the encoding')
def check_torch_flops(make):
    from torch.utils.flop_counter import FlopCounterMode

    def flops(model):
        with FlopCounterMode(display=False) as counter:
            model(images())
        return counter.get_total_flops()
    check_count(make, flops, PRODUCTS)


@client('torch', 'distributed.checkpoint: get and set full state dict')
def check_torch_dcp(make):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    options = StateDictOptions(full_state_dict=True)
    state, model = get_model_state_dict(make(), options=options), make.asleep()
    set_model_state_dict(model, state, options=options)
    return model, make()


def one_process():
    store = torch.distributed.HashStore()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)


@client('torch', 'FSDP2: fully_shard each block and the model, one step')
def check_torch_fully_shard(make):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    one_process()
    mesh, model = init_device_mesh('cpu', (1,)), make(num_classes=5)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    train(fully_shard(model, mesh=mesh))
    return model, train(make(num_classes=5))


@client('torch', 'FSDP2: fully_shard each module with parameters, one step')
def check_torch_fully_shard_leaves(make):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    one_process()
    mesh, model = init_device_mesh('cpu', (1,)), make(num_classes=5)
    for module in [m for m in model.modules() if m is not model and [*m.parameters(recurse=False)]][::-1]:
        fully_shard(module, mesh=mesh)  # torch wants children before parents
    train(fully_shard(model, mesh=mesh))
    return model, train(make(num_classes=5))


@client('torch', 'func.functional_call')
def check_torch_functional_call(make):
    model, state = make.asleep(), dict(make().named_parameters())
    return lambda x: torch.func.functional_call(model, state, (x,)), make()


def ensemble(make):
    models = [make(num_classes=5), train(make(num_classes=5))]
    parameters, buffers = torch.func.stack_module_state(models)
    empty = copy.deepcopy(models[0]).to('meta')
    return models, parameters, buffers, lambda p, b, x: torch.func.functional_call(empty, (p, b), (x,))


@client('torch', 'func ensemble: stack_module_state, vmap')
def check_torch_ensemble(make):
    models, parameters, buffers, call = ensemble(make)
    run = torch.func.vmap(call, (0, 0, None))

    def no_grad(x):
        with torch.no_grad():
            return run(parameters, buffers, x)
    return no_grad, lambda x: torch.stack([model(x) for model in models])


@client('torch', 'func ensemble: gradients through vmap')
def check_torch_ensemble_gradients(make):
    models, parameters, buffers, call = ensemble(make)
    names = [name for name, _ in models[0].named_parameters()]

    def run(x):
        logits = torch.func.vmap(call, (0, 0, None))(parameters, buffers, x)  # [2, B, 5]
        loss = sum(F.cross_entropy(one, LABELS) for one in logits)
        found = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
        return gradient_norms([torch.zeros_like(parameters[n]) if g is None else g for n, g in zip(names, found)])
    return run, lambda x: gradients_one_by_one(models, [x, x], [LABELS, LABELS])


@client('torch', 'func gradients of each sample: vmap(grad)')
def check_torch_sample_gradients(make):
    model = make(num_classes=5)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    def run(x):
        return gradient_norms(torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, LABELS).values())
    return run, lambda x: gradients_one_by_one([model, model], x.split(1), LABELS.split(1))


@client('torch', 'optim.swa_utils.AveragedModel')
def check_torch_averaged(make):
    model = make(num_classes=5)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(train(model))
    return averaged, train(make(num_classes=5))


@client('torch', 'parametrizations.weight_norm on all linear layers')
def check_torch_parametrizations(make):
    model = make()
    for module in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        nn.utils.parametrizations.weight_norm(module)
    return model, make()


@client('torch', 'prune.l1_unstructured on all linear layers')
def check_torch_prune(make):
    from torch.nn.utils import prune
    model, reference = make(), make()
    for module, twin in zip(model.modules(), reference.modules()):
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, 'weight', 0.5)
            with torch.no_grad():
                twin.weight[module.weight_mask == 0] = 0
    return model, reference


@client('torch', 'jit.trace')
def check_torch_trace(make):
    return torch.jit.trace(make(), images(2)), make()


@client('torch', 'meta device, to_empty, load_state_dict')
def check_torch_to_empty(make):
    model = make.asleep(device='meta').to_empty(device='cpu')
    model.load_state_dict(make().state_dict())
    return model, make()


@client('torch', 'meta device, load_state_dict(assign=True)')
def check_torch_assign(make):
    model = make.asleep(device='meta')
    model.load_state_dict(make().state_dict(), assign=True)
    return model, make()


@client('torch', 'save and load of the whole model, deepcopy')
def check_torch_save(make):
    file = io.BytesIO()
    torch.save(copy.deepcopy(make()), file)
    file.seek(0)
    return torch.load(file, weights_only=False), make()


# ---- torchvision


@client('torchvision', "create_feature_extractor(model, ['norm'])")
def check_torchvision_extractor(make):
    from torchvision.models.feature_extraction import create_feature_extractor
    model, reference = create_feature_extractor(make(), ['norm']), make()
    return lambda x: model(x)['norm'].mean(1), lambda x: reference.forward_features(x).mean(1)


def detector(make, kind, **kwargs):
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out_channels = make(features_only=True, out_indices=(1,)), 64

        def forward(self, x):
            return {'0': self.body(x)[0]}

    model = kind(
        Backbone(), num_classes=5, min_size=160, max_size=160, image_mean=[0] * 3, image_std=[1] * 3, **kwargs)
    box = torch.tensor([[16., 16., 96., 112.]])
    model.train()
    losses = model(list(images()), [{'boxes': box, 'labels': label[None]} for label in LABELS])
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.backbone.body.model.blocks.parameters()), 'no gradient'
    model.eval()
    assert len(model(list(images()))) == 2
    reference = make()
    return (lambda x: pooled(model.backbone(model.transform(list(x))[0].tensors).values()),
            lambda x: pooled(reference.forward_intermediates(x, indices=(1,), intermediates_only=True)))


@client('torchvision', 'FasterRCNN on our features_only: losses, backward, boxes')
def check_torchvision_faster_rcnn(make):
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign
    return detector(
        make, FasterRCNN, rpn_anchor_generator=AnchorGenerator(((32, 64),), ((1.,),)),
        box_roi_pool=MultiScaleRoIAlign(['0'], 4, 2))


@client('torchvision', 'FCOS on our features_only: losses, backward, boxes')
def check_torchvision_fcos(make):
    from torchvision.models.detection import FCOS
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    return detector(make, FCOS, anchor_generator=AnchorGenerator(((32,),), ((1.,),)))


# ---- transformers


@client('transformers', "AutoModelForImageClassification, of a folder by timm's save_for_hf")
def check_transformers_timm_folder(make):
    from transformers import AutoModelForImageClassification
    folder = tempfile.mkdtemp()
    save_for_hf(make(), folder, safe_serialization=True)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    return lambda x: model(x).logits, make()


@client('transformers', 'AutoModelForImageClassification, of a folder by our hub.save; and so below')
def check_transformers_classifier(make):
    from transformers import AutoModelForImageClassification
    model = AutoModelForImageClassification.from_pretrained(make.folder()).eval()
    return lambda x: model(x).logits, make()


@client('transformers', 'AutoModel: pooler_output, hidden_states')
def check_transformers_model(make):
    from transformers import AutoModel
    model, reference = AutoModel.from_pretrained(make.folder()).eval(), make()

    def run(x):
        found = model(x, output_hidden_states=True)
        return torch.cat([found.pooler_output, pooled(found.hidden_states)], dim=1)

    def expected(x):
        last, maps = reference.forward_intermediates(x)
        return torch.cat([reference.forward_head(last, pre_logits=True), pooled(maps)], dim=1)
    return run, expected


@client('transformers', 'save_pretrained, from_pretrained')
def check_transformers_save(make):
    from transformers import AutoModelForImageClassification
    folder = tempfile.mkdtemp()
    AutoModelForImageClassification.from_pretrained(make.folder()).save_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    return lambda x: model(x).logits, make()


@client('transformers', 'from_pretrained(dtype=torch.bfloat16)')
def check_transformers_bfloat16(make):
    from transformers import AutoModelForImageClassification
    model = AutoModelForImageClassification.from_pretrained(make.folder(), dtype=torch.bfloat16).eval()
    reference = make().bfloat16()
    return lambda x: model(x).logits.float(), lambda x: reference(x.bfloat16()).float(), ROUGH


@client('transformers', 'AutoBackbone by timm, two feature maps')
def check_transformers_backbone(make):
    from transformers import TimmBackbone, TimmBackboneConfig
    config = TimmBackboneConfig(backbone=make.name, out_indices=[0, 1], use_pretrained_backbone=False)
    model = TimmBackbone(config).eval()
    reference = make(global_pool='token')
    model._backbone.model.load_state_dict(reference.state_dict(), strict=False)
    return lambda x: pooled(model(x).feature_maps), lambda x: pooled(reference.forward_intermediates(x)[1])


@client('transformers', 'Trainer, one step')
def check_transformers_trainer(make):
    from transformers import AutoModelForImageClassification, Trainer, TrainingArguments
    model = AutoModelForImageClassification.from_pretrained(make.folder(num_classes=5))
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=2, optim='sgd', learning_rate=LR,
        lr_scheduler_type='constant', max_grad_norm=0, use_cpu=True, report_to=[], save_strategy='no',
        disable_tqdm=True, logging_strategy='no')
    data = [{'pixel_values': x, 'labels': y.item()} for x, y in zip(images(), LABELS)]
    Trainer(model, args, train_dataset=data).train()
    return trained_alike(make, model.timm_model)


@client('transformers', "pipeline('image-classification')")
def check_transformers_pipeline(make):
    from torchvision.transforms.functional import to_pil_image
    from transformers import pipeline
    folder, reference = make.folder(num_classes=5), make(num_classes=5)
    pipe = pipeline('image-classification', folder, device='cpu')

    def pictures(x):
        return [to_pil_image((0.2 * one + 0.5).clamp(0, 1)) for one in x]

    def run(x):
        found = pipe(pictures(x), top_k=5)
        return torch.tensor([[s['score'] for s in sorted(one, key=lambda s: s['label'])] for one in found])
    return run, lambda x: reference(pipe.image_processor(pictures(x))['pixel_values']).softmax(-1)


def device_map(model, prefix, disk):
    """Everything on the CPU but the modules `disk`."""
    names = [name for name, _ in model.named_children()] + [name for name, _ in model.named_parameters(recurse=False)]
    names += [f'blocks.{i}' for i in range(len(model.blocks))]
    return {prefix + name: 'disk' if name in disk else 'cpu' for name in names if name != 'blocks'}


@client('transformers', 'device_map, a block and the encodings on disk')
def check_transformers_disk(make):
    from transformers import AutoModelForImageClassification
    places = device_map(make(), 'timm_model.', ('blocks.1', 'encodings'))
    model = AutoModelForImageClassification.from_pretrained(
        make.folder(), device_map=places, offload_folder=tempfile.mkdtemp()).eval()
    return lambda x: model(x).logits, make()


# ---- accelerate


@client('accelerate', 'cpu_offload')
def check_accelerate_cpu_offload(make):
    from accelerate import cpu_offload
    return cpu_offload(make(), execution_device=torch.device('cpu')), make()


@client('accelerate', 'disk_offload')
def check_accelerate_disk_offload(make):
    from accelerate import disk_offload
    return disk_offload(make(), tempfile.mkdtemp(), execution_device=torch.device('cpu')), make()


@client('accelerate', 'init_empty_weights, load_checkpoint_and_dispatch')
def check_accelerate_dispatch(make):
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    with init_empty_weights():
        model = make.asleep()
    return load_checkpoint_and_dispatch(model, f'{make.folder()}/model.safetensors', {'': 'cpu'}), make()


@client('accelerate', 'the same with a block and the encodings on disk')
def check_accelerate_dispatch_disk(make):
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    places = device_map(make(), '', ('blocks.1', 'encodings'))
    with init_empty_weights():
        model = make.asleep()
    return load_checkpoint_and_dispatch(
        model, f'{make.folder()}/model.safetensors', places, offload_folder=tempfile.mkdtemp()), make()


@client('accelerate', 'save_model, load_checkpoint_in_model')
def check_accelerate_save_model(make):
    from accelerate import Accelerator, load_checkpoint_in_model
    folder, model = tempfile.mkdtemp(), make.asleep()
    Accelerator(cpu=True).save_model(make(), folder)
    load_checkpoint_in_model(model, folder, strict=True)
    return model, make()


@client('accelerate', 'prepare, one step, save_state, load_state')
def check_accelerate_step(make):
    from accelerate import Accelerator
    accelerator, model, folder = Accelerator(cpu=True), make(num_classes=5), tempfile.mkdtemp()
    model, optimizer = accelerator.prepare(model, sgd(model))
    model.train()
    accelerator.backward(F.cross_entropy(model(images()), LABELS))
    optimizer.step()
    accelerator.save_state(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(folder)
    return trained_alike(make, accelerator.unwrap_model(model))


# ---- peft


def tuned(make, config):
    """What a check of peft returns: a model with adapters, after two steps, and one with the sum of all weights.

    All that is trained must get gradients, and the adapters must have an effect and survive saving.
    """
    from peft import PeftModel, get_peft_model
    model = get_peft_model(make(num_classes=5), config)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trainable.values(), lr=LR)
    train(train(model, optimizer), optimizer)  # in the first step half of an adapter gets no gradient
    without = [name for name, p in trainable.items() if p.grad is None or not p.grad.abs().max() > 0]
    assert not without, f'no gradient: {", ".join(without)}'
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(make(num_classes=5), folder).eval()
    assert difference(loaded(images()), model(images())) < SAME, 'saved and loaded it is another'
    assert difference(loaded.merge_and_unload()(images()), model(images())) < SAME, 'merged it is another'

    reference, found = make(num_classes=5), dict(model.base_model.model.named_modules())
    assert difference(model(images()), reference(images())) > SAME, 'no effect'
    with torch.no_grad():
        for name, module in reference.named_modules():
            twin = found.get(name)  # None inside what is saved as a whole
            if hasattr(twin, 'modules_to_save'):
                module.load_state_dict(twin.modules_to_save['default'].state_dict())
            elif hasattr(twin, 'lora_A'):
                a, b = twin.lora_A['default'].weight, twin.lora_B['default'].weight
                module.weight += twin.scaling['default'] * b @ a
    return model, reference


def own_layers(make, kind):
    """Names of the encodings' modules of a kind."""
    owners = tuple(f'{name}.' for name in getattr(make(), 'position_encodings', dict)())
    names = [name for name, m in make().named_modules() if isinstance(m, kind) and f'{name}.'.startswith(owners)]
    if not owners or not names:
        raise NotApplicable
    return names


@client('peft', 'LoRA on qkv, modules_to_save: head')
def check_peft_qkv(make):
    from peft import LoraConfig
    return tuned(make, LoraConfig(target_modules=['qkv'], modules_to_save=['head']))


@client('peft', "LoRA on 'all-linear'")
def check_peft_all_linear(make):
    from peft import LoraConfig
    return tuned(make, LoraConfig(target_modules='all-linear', exclude_modules=['head']))


@client('peft', "LoRA on the encoding's own linear layers alone")
def check_peft_own(make):
    from peft import LoraConfig
    return tuned(make, LoraConfig(target_modules=own_layers(make, nn.Linear)))


@client('peft', 'LoRA on qkv, modules_to_save: the encoding')
def check_peft_modules_to_save(make):
    from peft import LoraConfig
    model = make()
    names = own_layers(make, timm_sape.PositionEncoding)
    names = [name for name in names if [*model.get_submodule(name).parameters()]]
    if not names:
        raise NotApplicable
    return tuned(make, LoraConfig(target_modules=['qkv'], modules_to_save=names))


# ---- trainers


@client('lightning', 'fit of one step, checkpoint')
def check_lightning(make):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, start):
            super().__init__()
            self.model = start

        def training_step(self, batch, index):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(), LABELS), batch_size=2)
    trainer = lightning.Trainer(
        max_steps=1, accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False)
    trainer.fit(Module(make(num_classes=5).train()), data)
    file = f'{tempfile.mkdtemp()}/last.ckpt'
    trainer.save_checkpoint(file)
    return trained_alike(make, Module.load_from_checkpoint(file, start=make.asleep(num_classes=5)).model)


@client('lightning', 'Fabric.init_module(empty_init=True), load')
def check_lightning_fabric(make):
    import lightning
    fabric, file = lightning.Fabric(accelerator='cpu', devices=1), f'{tempfile.mkdtemp()}/model.ckpt'
    fabric.save(file, {'model': make()})
    with fabric.init_module(empty_init=True):
        model = make.asleep()
    model = fabric.setup_module(model)
    fabric.load(file, {'model': model})
    return model.eval(), make()


def fastai_data():
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    return DataLoaders(*[DataLoader(list(zip(images(), LABELS)), bs=2) for _ in range(2)])


@client('fastai', 'Learner, one step')
def check_fastai_learner(make):
    import fastai.callback.progress  # noqa: F401  (gives a learner no_bar)
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper
    learner = Learner(
        fastai_data(), make(num_classes=5), loss_func=F.cross_entropy, lr=LR, cbs=[], path=tempfile.mkdtemp(),
        opt_func=partial(OptimWrapper, opt=torch.optim.SGD), train_bn=True)
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, lr=LR, wd=0)
    return trained_alike(make, learner.model)


@client('fastai', "vision_learner('test_vit_...'), one step")
def check_fastai_vision_learner(make):
    import fastai.callback.progress  # noqa: F401  (gives a learner no_bar)
    from fastai.vision.learner import vision_learner
    learner = vision_learner(
        fastai_data(), make.name, pretrained=False, n_out=5, loss_func=F.cross_entropy, path=tempfile.mkdtemp())
    body = learner.model[0].model
    body.load_state_dict(make(num_classes=0, global_pool='token').state_dict())
    before = [p.clone() for p in body.parameters()]
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    moved = [not torch.equal(p, q) for p, q in zip(body.parameters(), before)]
    assert sum(moved) > 0.9 * len(moved), f'only {sum(moved)} of {len(moved)} parameters have moved'
    reference = make(num_classes=0, global_pool='token')
    reference.load_state_dict(body.state_dict())
    return body.eval(), reference


@client('skorch', 'NeuralNetClassifier, one step')
def check_skorch(make):
    from skorch import NeuralNetClassifier
    net = NeuralNetClassifier(
        make(num_classes=5), criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=LR, max_epochs=1,
        batch_size=2, train_split=None, verbose=0)
    net.fit(images().numpy(), LABELS.numpy())
    return trained_alike(make, net.module_)


# ---- models inside other models


@client('segmentation-models-pytorch', 'DPT, encoder tu-test_vit_...: forward, backward, features')
def check_smp_dpt(make):
    import segmentation_models_pytorch as smp
    model = smp.create_model(
        'dpt', encoder_name=f'tu-{make.name}', encoder_weights=None, encoder_depth=2, encoder_output_indices=[0, 1],
        decoder_intermediate_channels=(8, 16), decoder_fusion_channels=8, classes=2)
    reference = make(global_pool='token')
    model.encoder.model.load_state_dict(reference.state_dict())
    model.train()(images()).square().mean().backward()
    assert all(p.grad is not None for p in model.encoder.model.blocks.parameters()), 'no gradient'
    model.eval()
    assert model(images()).shape == (2, 2, 160, 160)
    return lambda x: pooled(model.encoder(x)[0]), lambda x: pooled(reference.forward_intermediates(x)[1])


@client('open-clip-torch', 'CustomTextCLIP with a timm tower: encode_image, contrastive step')
def check_open_clip(make):
    import open_clip
    model = open_clip.CustomTextCLIP(
        32, dict(timm_model_name=make.name, timm_pool='avg', timm_proj='', image_size=160),
        dict(context_length=8, vocab_size=50, width=32, heads=2, layers=1))
    model.visual.trunk.load_state_dict(make(num_classes=32).state_dict())
    tokens = torch.randint(1, 50, (2, 8))
    image, text, scale = model(images(), tokens)
    open_clip.ClipLoss()(image, text, scale).backward()
    assert all(p.grad is not None for p in model.visual.trunk.blocks.parameters()), 'no gradient'
    return model.eval().encode_image, make(num_classes=32)


@client('open-clip-torch', 'lock_image_tower(unlocked_groups=1), gradient checkpointing')
def check_open_clip_lock(make):
    from open_clip.timm_model import TimmModel
    tower = TimmModel(make.name, 32, 160, pool='avg', proj='linear')
    reference = make(num_classes=0, global_pool='token')
    reference.reset_classifier(0, 'avg')
    tower.trunk.load_state_dict(reference.state_dict())
    tower.lock(unlocked_groups=1)
    free = {as_in_vit(name).split('.')[0] for name, p in tower.trunk.named_parameters() if p.requires_grad}
    assert free and 'patch_embed' not in free, f'left unlocked: {free}'
    tower.set_grad_checkpointing()
    return tower.trunk, reference


def lightly_vit(make):
    from lightly.models.modules import MaskedVisionTransformerTIMM
    return MaskedVisionTransformerTIMM(make(), weight_initialization='skip', pos_embed_initialization='skip')


LIGHTLY = (
    'the class adds `pos_embed` itself, which most of our models do not have, and calls the blocks with tokens alone, '
    'without their position. Use `forward_features(keep_indices=...)`, as in the row with `random_token_mask`.')


@client('lightly', 'MaskedVisionTransformerTIMM: encode', why=LIGHTLY)
def check_lightly(make):
    model, reference = lightly_vit(make), make()
    return lambda x: model.encode(x).mean(1), lambda x: reference.forward_features(x).mean(1)


@client('lightly', 'MaskedVisionTransformerTIMM: initialisation of its own', why=LIGHTLY)
def check_lightly_init(make):
    from lightly.models.modules import MaskedVisionTransformerTIMM
    return MaskedVisionTransformerTIMM(make())


def darkest(x):
    """Indices of the darker half of the patches among the tokens: the same patches in any order."""
    return F.unfold(x, PATCH, stride=PATCH).mean(1).argsort(1)[:, :50] + 1


@client('lightly', 'MAE: encode(idx_keep)', why=LIGHTLY)
def check_lightly_mae(make):
    model, reference, everything = lightly_vit(make), make(), torch.arange(101).expand(2, -1)
    found = model.encode(images(), idx_keep=everything)
    assert difference(found, reference.forward_features(images())) < SAME, 'keeping all is not the same'
    return lambda x: model.encode(x, idx_keep=darkest(x)).mean(1)


@client('lightly', 'SimMIM: encode(idx_mask), gradients', why=LIGHTLY)
def check_lightly_simmim(make):
    model = lightly_vit(make)
    nn.init.normal_(model.mask_token)
    model.encode(images(), idx_mask=darkest(images())).square().mean().backward()
    assert model.mask_token.grad.abs().max() > 0
    return lambda x: model.encode(x, idx_mask=darkest(x)).mean(1)


@client('lightly', "MAE: random_token_mask, our forward_features(keep_indices=), lightly's decoder, gradients")
def check_lightly_keep_indices(make):
    from lightly.models import utils
    from lightly.models.modules import MaskedVisionTransformerDecoderTIMM
    model = make()
    wrapped = lightly_vit(make) if make.encoding == CONTROL else None  # timm's ViT has no keep_indices
    vit = wrapped.vit if wrapped else model

    def encode(x, kept):  # the class token is kept, as token 0
        return wrapped.encode(x, idx_keep=kept) if wrapped else model.forward_features(x, keep_indices=kept[:, 1:] - 1)

    kept, masked = utils.random_token_mask((2, 101), mask_ratio=0.75)
    decoder = MaskedVisionTransformerDecoderTIMM(num_patches=100, embed_dim=64, depth=1, num_heads=2)
    tokens = utils.repeat_token(decoder.mask_token, (2, 101))
    tokens = decoder(utils.set_at_index(tokens, kept, encode(images(), kept)))
    found = nn.Linear(64, 3 * PATCH * PATCH)(utils.get_at_index(tokens, masked))
    F.mse_loss(found, utils.get_at_index(utils.patchify(images(), PATCH), masked - 1)).backward()
    assert all(p.grad is not None for p in vit.blocks.parameters()), 'no gradient'
    everything = encode(images(), torch.arange(101).expand(2, -1))
    assert difference(everything, make().forward_features(images())) < SAME, 'keeping all is not the same'
    return lambda x: encode(x, F.pad(darkest(x), (1, 0))).mean(1)


@client('torchgeo', 'ClassificationTask(model=test_vit_...), one training step')
def check_torchgeo(make):
    from torchgeo.trainers import ClassificationTask
    task = ClassificationTask(model=make.name, num_classes=5)
    reference = make(num_classes=5, global_pool='token')
    task.model.load_state_dict(reference.state_dict())
    task.log = task.log_dict = lambda *args, **kwargs: None
    task.training_step({'image': images(), 'label': LABELS}, 0).backward()
    assert sum(p.grad is not None for p in task.model.parameters()) > 0.9 * len([*task.model.parameters()])
    return task.eval(), reference


@client('torchgeo', "SemanticSegmentationTask(model='dpt', backbone='tu-vit_tiny_...'), one training step")
def check_torchgeo_segmentation(make):
    from torchgeo.trainers import SemanticSegmentationTask
    name = make.name.removeprefix('test_').replace('vit_', 'vit_tiny_')  # it wants four blocks, and takes no arguments
    if make.encoding == CONTROL:
        name = 'vit_tiny_patch16_224' if make.host == 'vit' else 'naflexvit_base_patch16_gap'
    task = SemanticSegmentationTask(model='dpt', backbone=f'tu-{name}', num_classes=5)
    task.log = task.log_dict = lambda *args, **kwargs: None
    x, vit = F.interpolate(images()[:1], 224), awake(task.model.encoder.model)
    task.training_step({'image': x, 'mask': torch.zeros(1, 224, 224, dtype=torch.int64)}, 0).backward()
    assert sum(p.grad is not None for p in vit.blocks.parameters()) > 0.9 * len([*vit.blocks.parameters()])
    reference = awake(timm.create_model(name))
    assert difference(
        pooled(task.eval().model.encoder(x)[0]),
        pooled(reference.eval().forward_intermediates(x, indices=[2, 5, 8, 11], intermediates_only=True))) < SAME


@client('huggingface-hub', 'PyTorchModelHubMixin: save_pretrained, from_pretrained')
def check_hub_mixin(make):
    from huggingface_hub import PyTorchModelHubMixin

    class Net(nn.Module, PyTorchModelHubMixin):
        def __init__(self, name: str):
            super().__init__()
            self.body = make.asleep() if name == make.name else None

        def forward(self, x):
            return self.body(x)

    folder, model = tempfile.mkdtemp(), Net(make.name)
    model.body.load_state_dict(make().state_dict())
    model.save_pretrained(folder)
    return Net.from_pretrained(folder).eval(), make()


@client('safetensors', 'save_model, load_model')
def check_safetensors(make):
    from safetensors.torch import load_model, save_model
    file, model = f'{tempfile.mkdtemp()}/model.safetensors', make.asleep()
    save_model(make(), file)
    load_model(model, file)
    return model, make()


# ---- explanations


@client('grad-cam', 'GradCAM with reshape_transform')
def check_grad_cam(make):
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    class Coarse(GradCAM):
        def get_target_width_height(self, x):  # upsampling would mix neighbours
            return 10, 10

    model, reference = make(), make()
    cam = Coarse(model, [model.blocks[-1].norm1], lambda y: y[:, 1:].transpose(1, 2).unflatten(2, (10, 10)))

    def run(x):
        maps = torch.from_numpy(cam(x, targets=[ClassifierOutputTarget(0)] * 2))  # [B, 10, 10]
        assert maps.std() > 0, 'an empty map'
        return maps.flatten(1).sort().values

    def expected(x):
        kept = []
        hook = reference.blocks[-1].norm1.register_forward_hook(lambda *args: kept.append(args[-1]))
        logits = reference(x)
        hook.remove()
        gradient, = torch.autograd.grad(logits[:, 0].sum(), kept)
        maps = (kept[0] * gradient[:, 1:].mean(1, keepdim=True)).sum(-1)[:, 1:].relu()
        maps = maps - maps.amin(1, keepdim=True)
        return (maps / maps.amax(1, keepdim=True)).sort().values
    return run, expected, 1e-3


@client('captum', 'IntegratedGradients')
def check_captum_integrated_gradients(make):
    from captum.attr import IntegratedGradients
    model, reference = make(), make()

    def run(x):
        return IntegratedGradients(model).attribute(x, target=0, n_steps=8, method='riemann_middle').sum((1, 2, 3))

    def expected(x):
        points = [((step + 0.5) / 8 * x).requires_grad_() for step in range(8)]
        gradients = [torch.autograd.grad(reference(point)[:, 0].sum(), point)[0] for point in points]
        return (x * sum(gradients) / 8).sum((1, 2, 3))
    return run, expected


@client('captum', 'LayerGradCam, on the last norm1')
def check_captum_layer_grad_cam(make):
    from captum.attr import LayerGradCam
    model, reference = make(), make()

    def expected(x):
        kept = []
        hook = reference.blocks[-1].norm1.register_forward_hook(lambda *args: kept.append(args[-1]))
        logits = reference(x)
        hook.remove()
        gradient, = torch.autograd.grad(logits[:, 0].sum(), kept)
        return (kept[0] * gradient.mean(2, keepdim=True)).sum(1)  # for captum tokens are channels
    return lambda x: LayerGradCam(model, model.blocks[-1].norm1).attribute(x, target=0).squeeze(1), expected


@client('captum', 'LayerIntegratedGradients, on the patch embedding')
def check_captum_layer_integrated(make):
    from captum.attr import IntegratedGradients, LayerIntegratedGradients
    model, reference = make(), make()
    options = dict(target=0, n_steps=8)  # the embedding is affine: its path is that of the images

    def run(x):
        return LayerIntegratedGradients(model, patch_embedding(model)).attribute(x, **options).sum((1, 2))
    return run, lambda x: IntegratedGradients(reference).attribute(x, **options).sum((1, 2, 3)), 1e-3


# ---- quantisation and pruning


def dequantized(make, model, weight):
    """The reference of a model whose linear layers are quantised: the same with plain weights as they are now."""
    reference, changed = make(), 0
    with torch.no_grad():
        for name, module in reference.named_modules():
            if isinstance(module, nn.Linear):
                found = weight(model.get_submodule(name)).dequantize()
                changed += not torch.equal(found, module.weight)
                module.weight.copy_(found)
    assert changed, 'nothing is quantised'
    return reference


@client('torchao', 'quantize_(model, Int8WeightOnlyConfig())')
def check_torchao(make):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    model = make()
    quantize_(model, Int8WeightOnlyConfig())
    return model, dequantized(make, model, lambda m: m.weight), 1e-3


@client('torchao', 'quantize_(model, Int8DynamicActivationInt8WeightConfig())')
def check_torchao_dynamic(make):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    model = make()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model, make(), ROUGH


@client('optimum-quanto', 'quantize(weights=qint8), freeze')
def check_quanto(make):
    from optimum.quanto import freeze, qint8, quantize
    model = make()
    quantize(model, weights=qint8)
    freeze(model)
    return model, dequantized(make, model, lambda m: m.weight), 0.02


@client('bitsandbytes', 'Linear8bitLt for all linear layers, by transformers')
def check_bitsandbytes(make):
    from transformers import AutoModelForImageClassification, BitsAndBytesConfig
    model = AutoModelForImageClassification.from_pretrained(
        make.folder(), quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map='cpu').eval()
    return lambda x: model(x).logits, make(), ROUGH


@client('torch-pruning', 'half of the hidden units of each MLP', why=(
    'its graph does not know the size of channels that an encoding makes with a parameter of its own and appends to q '
    'and k.'))
def check_torch_pruning(make):
    import torch_pruning
    model = make()
    keep = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    for block in model.blocks:
        keep.remove(block.mlp.fc1)
    torch_pruning.pruner.BasePruner(
        model, images(), torch_pruning.importance.MagnitudeImportance(), pruning_ratio=0.5, ignored_layers=keep).step()
    assert all(block.mlp.fc2.in_features == 128 for block in model.blocks)
    return model


# ---- privacy


def sample_gradients(make, prepare):
    """What a check of opacus returns: norms of the gradients of each sample."""
    from opacus import GradSampleModule
    model = GradSampleModule(prepare(make(num_classes=5)), loss_reduction='sum')
    reference = prepare(make(num_classes=5))

    def run(x):
        model.train().zero_grad()
        F.cross_entropy(model(x), LABELS, reduction='sum').backward()
        without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad_sample is None]
        assert not without, f'no gradient of each sample: {", ".join(without)}'
        return gradient_norms([p.grad_sample for p in model.parameters() if p.requires_grad])

    return run, lambda x: gradients_one_by_one([reference, reference], x.split(1), LABELS.split(1))


OPACUS_BUFFERS = 'opacus refuses a layer with parameters and buffers, and these keep their tables in buffers. See {}.'
OPACUS_LAYERS = (
    'without trainable tokens opacus hooks each module that has parameters. It wants a single input and a batch '
    'dimension, but an encoding has further arguments, and some biases are the same for all samples. See {}.')
OPACUS_ADVICE = 'the row with the tokens frozen where there are buffers'


@client('opacus', 'GradSampleModule', why=OPACUS_BUFFERS.format(OPACUS_ADVICE))
def check_opacus(make):
    return sample_gradients(make, lambda model: model)


def freeze_parameters(model, names):
    for name, p in model.named_parameters():
        if as_in_vit(name).startswith(names):
            p.requires_grad = False
    return model


@client('opacus', 'GradSampleModule, tokens and pos_embed frozen only where there are buffers')
def check_opacus_advice(make):
    def prepare(model):
        return freeze_parameters(model, ('cls_token', 'pos_embed')) if [*model.buffers()] else model
    return sample_gradients(make, prepare)


@client('opacus', 'GradSampleModule, tokens and pos_embed frozen', why=OPACUS_LAYERS.format(OPACUS_ADVICE))
def check_opacus_frozen_tokens(make):
    return sample_gradients(make, lambda model: freeze_parameters(model, ('cls_token', 'pos_embed')))


@client(
    'opacus', 'GradSampleModule, all but the last block and the head frozen', why=OPACUS_LAYERS.format('the next row'))
def check_opacus_frozen(make):
    return sample_gradients(make, lambda model: freeze_parameters(
        model, ('cls_token', 'pos_embed', 'patch_embed', 'encodings', 'blocks.0')))


@client(
    'opacus', 'GradSampleModule, all but cls_token, the last block and the head frozen',
    why=OPACUS_BUFFERS.format('the row above'))
def check_opacus_frozen_but_token(make):
    return sample_gradients(make, lambda model: freeze_parameters(
        model, ('pos_embed', 'patch_embed', 'encodings', 'blocks.0')))


@client(
    'opacus', 'PrivacyEngine.make_private, one step without noise', why=OPACUS_BUFFERS.format(OPACUS_ADVICE))
def check_opacus_engine(make):
    from opacus import PrivacyEngine
    model = make(num_classes=5).train()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(), LABELS), batch_size=2)
    model, optimizer, data = PrivacyEngine().make_private(
        module=model, optimizer=sgd(model), data_loader=data, noise_multiplier=0., max_grad_norm=1e9,
        poisson_sampling=False)
    train(model, optimizer)
    return trained_alike(make, model._module)


# ---- counters


@client('fvcore', 'FlopCountAnalysis: as many as nope, and the products of the encoding')
def check_fvcore(make):
    from fvcore.nn import FlopCountAnalysis
    check_count(make, lambda model: int(FlopCountAnalysis(model, images()).total()), PRODUCTS)


@client('torchinfo', 'summary: number of parameters', why=(
    'torchinfo counts the parameters of a module once more if it is called outside its parent, as `peg` is after the '
    'first block.'))
def check_torchinfo(make):
    from torchinfo import summary
    found = summary(make(), input_data=images(), verbose=0).total_params
    expected = sum(p.numel() for p in make().parameters())
    assert found == expected, f'{found:,} parameters instead of {expected:,}'


@client('torchinfo', 'summary: as many multiply-adds as nope, and the layers of the encoding')
def check_torchinfo_operations(make):
    from torchinfo import summary
    check_count(make, lambda model: summary(model, input_data=images(), verbose=0).total_mult_adds, LAYERS)


@client('ptflops', 'as many operations as nope, and the layers of the encoding; number of parameters')
def check_ptflops(make):
    from ptflops import get_model_complexity_info
    count = partial(get_model_complexity_info, as_strings=False, print_per_layer_stat=False, verbose=False)
    check_count(make, lambda model: count(model, (3, 160, 160))[0], LAYERS)
    found, expected = count(make(), (3, 160, 160))[1], sum(p.numel() for p in make().parameters())
    assert found == expected, f'{found:,} parameters instead of {expected:,}'


@client('thop', 'as many operations as nope, and the layers of the encoding', why=(
    "thop counts `nn.Linear` but none of its subclasses, which the encodings' layers are."))
def check_thop(make):
    from thop import profile
    check_count(make, lambda model: int(profile(model, (images(),), verbose=False)[0]), LAYERS)


@client('calflops', 'as many flops as nope, and the layers of the encoding')
def check_calflops(make):
    from calflops import calculate_flops
    count = partial(calculate_flops, input_shape=(1, 3, 160, 160), output_as_string=False, print_results=False)
    check_count(make, lambda model: count(model)[0], LAYERS)


# ---- export


@client('openvino', 'convert_model, inference on the CPU')
def check_openvino(make):
    import openvino
    model = openvino.Core().compile_model(
        openvino.convert_model(make(), example_input=images(2)), 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})
    return lambda x: torch.from_numpy(model(x.numpy())[0]), make(), 1e-3


@client('executorch', 'torch.export, lowered to XNNPACK, inference on the CPU')
def check_executorch(make):
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime
    exported = torch.export.export(make(), (images(2),))
    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    program = Runtime.get().load_program(program.buffer)  # its methods point into it
    return lambda x: program.load_method('forward').execute((x,))[0], make(), 1e-3


# ---- running them


def one_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()] or ['']
    lines = [*lines[:2], '...', lines[-1]] if len(lines) > 3 else lines
    text = f'{type(error).__name__}: {" ".join(line.strip() for line in lines)}'
    for path in (str(ROOT), sys.prefix, tempfile.gettempdir()):
        text = text.replace(path, '')
    text = re.sub(r'/tmp\w+', 'FOLDER', text)
    return text if len(text) <= 300 else f'{text[:300]} ...'


def judge(check, make):
    """The cells of one model: True, False, or None where there is nothing to say; and what went wrong in which."""
    cells, said = dict(works=False, equal=None, position=None), {}
    torch.manual_seed(0)
    try:
        result = check(make)
        run, reference, tolerance = (*(result if isinstance(result, tuple) else (result,)), None, None)[:3]
        if run is not None:
            inputs = [images(), exchanged(images())]
            found = [run(x).detach() for x in inputs]
            assert all(f.isfinite().all() for f in found), 'not finite'
            expected = [reference(x).detach() for x in inputs] if reference is not None else found
            errors = [difference(f, e) for f, e in zip(found, expected)]
        cells['works'] = True
    except NotApplicable:
        return None, {}
    except Exception as error:
        logging.exception('%s, %s', check.name, make.encoding)
        return cells, {'works': one_line(error)}

    tolerance = tolerance or SAME
    if reference is not None:
        cells['equal'] = all(error < tolerance for error in errors)
        said['equal'] = f'off by {errors[0]:.0e}, with patches in another order {errors[1]:.0e}'
    if run is not None and tolerance < ROUGH:
        moved = difference(found[1], found[0])
        cells['position'] = moved < SAME if make.encoding == 'nope' else moved > MOVED
        said['position'] = f'another order of patches changes it by {moved:.0e}'
    logging.warning('%s, %s: %s %s', check.name, make.encoding, cells, said)
    return cells, {column: text for column, text in said.items() if not cells[column]}


def models(sabotage=None):
    """The control, and one `Make` for each encoding; or others under their names, broken."""
    makes = [Make(encoding) for encoding in (CONTROL, *ENCODINGS)]
    for make in makes[1:] if sabotage == 'position' else ():
        make.name = f'test_{make.host}_{"ape" if make.encoding == "nope" else "nope"}'
    if sabotage == 'values':
        forward = timm.layers.PatchEmbed.forward
        timm.layers.PatchEmbed.forward = lambda self, x: forward(self, x) * (1 + 0.1 * torch.rand(()))
    return makes


def run_here(check, sabotage):
    """Run a check on all models in this process. One line of JSON for each model goes to standard output."""
    warnings.simplefilter('ignore')
    stdout, sys.stdout = sys.stdout, sys.stderr  # some clients print
    for make in models(sabotage):
        cells, said = judge(check, make)
        print(json.dumps([make.encoding, cells, said]), file=stdout, flush=True)


def run_apart(check, sabotage, verbose):
    """Run a check in a process of its own, so that nothing that it does or breaks reaches another one."""
    try:
        check.version = version(check.package)
    except PackageNotFoundError:
        check.version = 'not installed'
        return {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, '--child', check.name, '--host', Make.host, '--encodings', *ENCODINGS]
        command += ['--sabotage', sabotage] if sabotage else []
        environment = {
            'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', **os.environ, 'TMPDIR': folder, 'HF_HUB_OFFLINE': '1'}
        try:
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=TIMEOUT)
            out, errors, end = done.stdout, done.stderr, f'the process ended with {done.returncode}'
        except subprocess.TimeoutExpired as e:
            out, errors, end = e.stdout or b'', e.stderr or b'', f'not finished after {TIMEOUT} s'
    if verbose:
        print(errors.decode(errors='replace'), file=sys.stderr)
    results = {encoding: (cells, said) for encoding, cells, said in map(json.loads, out.decode().splitlines())}
    for encoding in (CONTROL, *ENCODINGS):
        results.setdefault(encoding, (dict(works=False, equal=None, position=None), {'works': end}))
    return results


def count(results, column):
    """The cell of our models: how many pass, and which do not."""
    cells = {encoding: results[encoding][0] for encoding in ENCODINGS if results[encoding][0] is not None}
    asked = {encoding: cell[column] for encoding, cell in cells.items() if cell[column] is not None}
    if not asked:
        return ''
    failed = [encoding for encoding, passed in asked.items() if not passed]
    if len(failed) == len(asked) > 1:
        return f'none of {len(asked)}'
    passed = f'{len(asked) - len(failed)}/{len(asked)}'
    return f'{passed}: not {", ".join(f"`{encoding}`" for encoding in failed)}' if failed else passed


def of_control(cells):
    if cells is None:
        return ''
    if not cells['works']:
        return 'no'
    failed = [name for name in ('equal', 'position') if cells[name] is False]
    return 'yes' + ''.join(f', but not {dict(equal="equal", position="its position")[name]}' for name in failed)


def render(table):
    """The table, and below it what went wrong, as Markdown."""
    control = "timm's ViT" if Make.host == 'vit' else "timm's NaFlexVit"
    lines = [
        f'| client | version | feature | {control} | ours work | equal to `model(x)` | position applied |',
        '|---|---|---|---|---|---|---|']
    notes = []
    for check, results in table:
        head = f'| {check.package} | {check.version} | {check.feature} |'
        if not results:
            lines.append(f'{head} | | | |')
            continue
        lines.append(f'{head} {of_control(results[CONTROL][0])} | ' + ' | '.join(
            count(results, column) for column in ('works', 'equal', 'position')) + ' |')
        groups = defaultdict(list)
        for encoding, (_, said) in results.items():
            for column, text in said.items():
                alike = re.sub(rf'\b{encoding}\b|[\d.,e+-]*\d', '', text)  # the same but for the name and numbers
                groups[column, alike].append((control if encoding == CONTROL else f'`{encoding}`', text))
        for (column, _), said in groups.items():
            names, (text, *_) = zip(*said)
            who = {len(ENCODINGS): 'all of ours', len(ENCODINGS) + 1: 'all'}.get(len(names), ', '.join(names))
            notes.append(f'- **{check.package}, {check.feature}**, {column}, {who}: {text}')
        if groups and check.why:
            fails_too = Make.host == 'naflexvit' and of_control(results[CONTROL][0]) == 'no'
            too = "timm's own NaFlexVit fails, too. Ours on a plain ViT: " if fails_too else ''
            notes.append(f'  - Why: {too}{check.why}')
    lines += [f'| {name} | {why} | | | | | |' for name, why in UNAVAILABLE.items()]
    return '\n'.join([*lines, '', *notes])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--host', choices=('vit', 'naflexvit'), default='vit', help='which models carry the encodings')
    parser.add_argument('--only', default='', help='run the checks whose name matches this regular expression')
    parser.add_argument('--encodings', nargs='+', help='others than those of the table, or fewer')
    parser.add_argument('--sabotage', choices=('position', 'values'), help='break our models: columns must fail')
    parser.add_argument('--install', action='store_true', help='install the packages, leaving torch and timm alone')
    parser.add_argument('--list', action='store_true', help='print the names of the checks')
    parser.add_argument('--verbose', action='store_true', help='print what the processes print, and tracebacks')
    parser.add_argument('--child', help=argparse.SUPPRESS)
    args = parser.parse_args()
    Make.host = args.host
    if args.encodings or args.host == 'naflexvit':
        ENCODINGS[:] = args.encodings or KINDS
    if args.child:
        return run_here(next(check for check in CHECKS if check.name == args.child), args.sabotage)
    checks = [check for check in CHECKS if re.search(args.only, check.name)]
    if args.list:
        return print('\n'.join(check.name for check in checks))
    if args.install:
        pins = [f'{name}=={version(name)}' for name in ('torch', 'torchvision', 'timm')]
        for package in dict.fromkeys(check.package for check in checks):
            done = subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', package, *pins])
            print(f'{package}: {"not installed" if done.returncode else version(package)}')
        return None

    tested, started, table = commit(), time.time(), []  # asked for before anyone edits the checkout
    for check in checks:
        table.append((check, run_apart(check, args.sabotage, args.verbose)))
        print(f'{time.time() - started:4.0f} s  {check.name}', file=sys.stderr)
    text = render(table)
    print(text)
    if not (args.only or args.encodings or args.sabotage):
        write(text, tested)


def write(text, tested):
    head = (
        f'{time.strftime("%Y-%m-%d")}, commit {tested}, Python {sys.version.split()[0]}, torch '
        f'{version("torch")}, timm {version("timm")}, on the CPU. Written by `.ci/clients`.\n\n'
        f'Of {len(ENCODINGS)} encodings (`{"`, `".join(ENCODINGS)}`), how many work; give what they give without the '
        'client; and are moved by exchanging patches of the image (`nope` must not be). A cell is empty where the '
        'check has no such output, where it compares by itself, or where rounding hides position.')
    name, title = ('clients', 'Clients') if Make.host == 'vit' else ('clients-naflexvit', 'Clients, with NaFlexVit')
    (ROOT / '.ci' / f'{name}-result.md').write_text(f'# {title}\n\n{head}\n\n{text}\n')


if __name__ == '__main__':
    main()
