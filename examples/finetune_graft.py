"""Does a graft help fine-tuning? Fine-tune a small pretrained ViT unchanged and with encodings grafted onto it.

    python examples/finetune_graft.py --data-dir ROOT

ROOT contains CIFAR-10, as torchvision stores it or as folders of images. For each seed, a Vision Transformer of timm
learns the first six classes; this is the pretrained base. Then it learns the other four from a few images, unchanged
and grafted. A seed determines the base, the images, the new head, the batches and the flips, which are the same for all
models, so runs with the same seed are paired. The optimizer is AdamW with layer-wise learning rates, as in
train_configs/finetune. The learning rate is the best of .0003, .001, .003, .01 and .03 for an unchanged base, chosen
with a seed that is not used here.
"""
import argparse
import copy
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from tqdm import tqdm

import timm_sape
from timm_sape.lab.machine import about
from timm_sape.lab.tables import write_csv
from timm_sape.lab.intervals import mean_interval, spread
from timm_sape.lab.position_data import load_cifar10_splits

BASE_CLASSES, CLASSES = range(6), range(6, 10)
SIZE = dict(
    img_size=32, patch_size=4, num_classes=len(BASE_CLASSES), embed_dim=64, depth=4, num_heads=2, mlp_ratio=2,
    class_token=False, global_pool='avg')
BATCH = 64


def draw(dataset, classes, count=None, seed=0):
    """Draw images of some classes, by default all, uint8 `[n, 3, 32, 32]`, and their labels, starting at 0, `[n]`."""
    found = [i for i, label in enumerate(dataset.targets) if label in classes]
    if len(found) < (count or 1):
        raise ValueError(
            f'there are only {len(found)} images of classes {classes[0]} to {classes[-1]}; lower --images or '
            '--base-images')
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    pairs = [dataset[found[i]] for i in tqdm(order, desc='images', delay=2)]
    if other := next((image.size for image, _ in pairs if image.size != (32, 32)), None):
        raise ValueError(f'--data-dir has an image of {other[0]}x{other[1]}; all must be 32x32')
    images = torch.from_numpy(np.stack([np.asarray(image.convert('RGB')) for image, _ in pairs]))
    return images.permute(0, 3, 1, 2), torch.tensor([classes.index(label) for _, label in pairs])


def normalized(images, labels):
    return images.float() / 127.5 - 1, labels


def train(model, images, labels, epochs, name, lr, layer_decay=None):
    optimizer = create_optimizer_v2(model, 'adamw', lr=lr, weight_decay=0.05, layer_decay=layer_decay)
    steps = len(images) // BATCH
    scheduler, _ = create_scheduler_v2(
        optimizer, 'cosine', num_epochs=epochs, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=steps)
    model.train()
    with tqdm(total=epochs * steps, desc=name, unit='step') as progress:
        for epoch in range(epochs):
            for step, index in enumerate(torch.randperm(len(images))[:steps * BATCH].split(BATCH)):
                scheduler.step_update(epoch * steps + step)
                batch = images[index]
                batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch, batch.flip(3))
                loss = F.cross_entropy(model(batch), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.set_postfix(loss=f'{loss.item():.2f}', refresh=False)
                progress.update()


@torch.no_grad()
def predict(model, images):
    return torch.cat([model.eval()(part) for part in images.split(BATCH)])


def top1(model, images, labels):
    return 100 * (predict(model, images).argmax(1) == labels).double().mean().item()


def gates(model):
    """The values of the gates of the grafted encodings, layer by layer."""
    encodings = model.position_encodings().values() if hasattr(model, 'position_encodings') else ()
    return [encoding.gated(torch.ones(1)).item() for encoding in encodings if encoding.gate is not None]


def judge(differences):
    """The bounds of the 95 % interval of the mean of paired differences, and a verdict."""
    _, low, high = mean_interval(differences)
    return low, high, 'better' if low > 0 else 'worse' if high < 0 else 'no difference shown'


def fine_tune(model, images, labels, epochs, name, seed, lr=0.01):
    random_seed(seed)  # the same head and the same batches for every model
    model.reset_classifier(len(CLASSES))
    train(model, images, labels, epochs, name, lr, layer_decay=0.75)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data-dir', type=Path, required=True, help='CIFAR-10')
    parser.add_argument('--output', type=Path, default=Path('finetune_graft.csv'))
    parser.add_argument('--graft', nargs='+', default=['sape2_k', 'rope2d'], help='encodings to graft, each by itself')
    parser.add_argument('--seeds', type=int, default=3, help='bases, each fine-tuned unchanged and with each graft')
    parser.add_argument('--first-seed', type=int, default=0, help='for runs that confirm earlier ones (default: 0)')
    parser.add_argument('--base-images', type=int, default=15000, help='number of images to train a base on')
    parser.add_argument('--base-epochs', type=int, default=15, help='epochs of each base')
    parser.add_argument('--images', type=int, default=1000, help='number of images to fine-tune on')
    parser.add_argument('--epochs', type=int, default=20, help='epochs of fine-tuning')
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    least = args.seeds - 1, args.first_seed + 1, args.base_epochs, args.epochs
    if min(least) < 1 or min(args.base_images, args.images) < BATCH:
        parser.error(f'--seeds must be at least 2, --first-seed 0, the epochs 1 and the images {BATCH}')
    try:
        if args.output.exists():
            raise ValueError(f'{args.output} exists; name a new file by --output')
        for pos_enc in args.graft:  # fail before the long computation
            timm_sape.graft('test_vit', pos_enc, **SIZE)
        train_set, test_set = list(load_cifar10_splits(args.data_dir).values())[:2]
        drawn = [(
            draw(train_set, BASE_CLASSES, args.base_images, seed),
            draw(train_set, CLASSES, args.images, seed),
        ) for seed in seeds]
        base_test, (test_images, test_labels) = (
            normalized(*draw(test_set, classes)) for classes in (BASE_CLASSES, CLASSES))
        args.output.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as e:
        parser.error(str(e))

    notes = f'{args.base_images} images and {args.base_epochs} epochs for the base'
    notes = f'{notes}, {args.images} and {args.epochs} for each; {about(torch.device("cpu"))}'
    rows, own, largest, moved = [], [], 0, dict.fromkeys(args.graft, 0)
    for seed, (base_data, data) in zip(seeds, drawn):
        random_seed(seed)
        base = timm.create_model('test_vit', **SIZE)
        train(base, *normalized(*base_data), args.base_epochs, f'base, seed {seed}', lr=2e-3)
        own.append(top1(base, *base_test))
        logits = predict(base, test_images)
        largest = max(largest, logits.abs().max().item())
        data = normalized(*data)
        for name in ('none', *args.graft):
            random_seed(seed)
            model = copy.deepcopy(base) if name == 'none' else timm_sape.graft(base, name)
            if name != 'none':
                moved[name] = max(moved[name], (predict(model, test_images) - logits).abs().max().item())
            fine_tune(model, *data, args.epochs, f'{name}, seed {seed}', seed)
            rows.append({
                'graft': name, 'seed': seed, 'top1': round(top1(model, test_images, test_labels), 2),
                'gates': ' '.join(f'{gate:.3f}' for gate in gates(model))})
        write_csv(rows, args.output, notes)

    print(f'\nThe bases have {spread(own, 1)} % on their own six classes. A graft moves their logits (largest logit: '
          f'{largest:.1f}) by at most:')
    print(', '.join(f'{name} {change:.1e}' for name, change in moved.items()))

    found = {name: [row['top1'] for row in rows if row['graft'] == name] for name in ('none', *args.graft)}
    print(f'\nTop-1 in percent on {len(test_labels)} images of the four new classes, {args.seeds} seeds:\n')
    print('| grafted | top-1 | difference from none | 95 % interval | size of the gates, by layer | verdict |')
    print('|---' * 6 + '|')
    for name, values in found.items():
        if name == 'none':
            print(f'| none | {spread(values, 1)} | | | | |')
            continue
        differences = [a - b for a, b in zip(values, found['none'])]
        low, high, verdict = judge(differences)
        layers = zip(*(map(abs, map(float, row['gates'].split())) for row in rows if row['graft'] == name))
        print(
            f'| {name} | {spread(values, 1)} | {mean(differences):+.2f} ± {stdev(differences):.2f} | '
            f'{low:+.2f} to {high:+.2f} | '
            f'{", ".join(f"{mean(layer):.2f}" for layer in layers)} | {verdict} |')
    print(f'\n{args.output}')


if __name__ == '__main__':
    main()
