"""Does Position-SHAP find position bias where it exists? The controlled test of its paper, on a CPU.

    python examples/position_bias.py --data-dir ROOT

ROOT contains CIFAR-10, as torchvision stores it or as folders of images. In CIFAR-10-Position each image is at half its
size in a random corner. Two classes are split into eight by corner, so position matters for them; for the other eight
classes it says nothing. A small Vision Transformer learns all sixteen. Then P-SHAP is measured on the correctly
classified test images, and a one-sided Mann-Whitney U test checks whether it is higher for the classes that depend on
position (Bruintjes and van Gemert, 'Learning to Adapt to Position Bias in Vision Transformer Classifiers', Sec. 5.1).

Training takes a hundredth of the paper's time: 32 x 32 pixels in patches of 4, width 96, 4 layers, mean pooling, AdamW.
"""
import argparse
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.stats import mannwhitneyu
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from tqdm import tqdm

import timm_sape  # noqa: F401  registers the models
from timm_sape.analysis import position_shap
from timm_sape.lab.machine import about
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.lab.position_data import CIFAR10Position, load_cifar10_splits

SIZE = dict(
    img_size=32, patch_size=4, num_classes=16, embed_dim=96, depth=4, num_heads=3, mlp_ratio=2, class_token=False,
    global_pool='avg')
BATCH = 128


def tensors(dataset, count, seed):
    """Draw a random subset of a data set, as normalized images `[n, 3, 32, 32]` and labels `[n]`."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    pairs = [dataset[i] for i in tqdm(order, desc='images', delay=2)]
    if other := next((image.size for image, _ in pairs if image.size != (32, 32)), None):
        raise ValueError(f'--data-dir has an image of {other[0]}x{other[1]}; all must be 32x32')
    images = torch.from_numpy(np.stack([np.asarray(image.convert('RGB')) for image, _ in pairs]))
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1, torch.tensor([label for _, label in pairs])


def train(model, images, labels, epochs, name):
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05)
    steps = len(images) // BATCH
    scheduler, _ = create_scheduler_v2(
        optimizer, 'cosine', num_epochs=epochs, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=steps)
    model.train()
    with tqdm(total=epochs * steps, desc=name, unit='step') as progress:
        for epoch in range(epochs):
            for step, index in enumerate(torch.randperm(len(images))[:steps * BATCH].split(BATCH)):
                scheduler.step_update(epoch * steps + step)
                loss = F.cross_entropy(model(images[index]), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.set_postfix(loss=f'{loss.item():.2f}', refresh=False)
                progress.update()


def draw(path, results, classes):
    """Draw P-SHAP of the classes, side by side, for each encoding."""
    figure = Figure(figsize=(9, 3.2 * len(results)), layout='constrained')
    for axes, (name, found, dependent, p) in zip(np.atleast_1d(figure.subplots(len(results), 1)), results):
        values = [found.values[found.correct & (found.labels == label)].numpy() for label in range(len(classes))]
        boxes = axes.boxplot(
            [v[np.isfinite(v)] for v in values], patch_artist=True, showfliers=False)
        for box, is_dependent in zip(boxes['boxes'], dependent):
            box.set_facecolor('#41ab5d' if is_dependent else 'white')
        axes.set(ylabel='P-SHAP', ylim=(0, 1), title=f'{name}: green depend on position, one-sided p = {p:.1e}')
        axes.set_xticks(axes.get_xticks(), classes, rotation=45, ha='right', fontsize=7)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data-dir', type=Path, required=True, help='CIFAR-10')
    parser.add_argument('--output', type=Path, default=Path('position_bias_output'), help='folder for all files')
    parser.add_argument('--pos-enc', nargs='+', default=['ape', 'ape+sape2_k', 'rope2d'], help='encodings to train')
    parser.add_argument('--epochs', type=int, default=12)
    parser.add_argument('--train-images', type=int, default=20000)
    parser.add_argument('--test-images', type=int, default=2000)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    if args.epochs < 1 or args.test_images < 2 or args.train_images < BATCH:
        parser.error(f'--epochs must be at least 1, --test-images 2 and --train-images {BATCH}')
    table, picture = (args.output / f'position_bias.{suffix}' for suffix in ('csv', 'png'))
    try:
        for path in (table, picture):
            if path.exists():
                raise ValueError(f'{path} exists; name another folder by --output')
        for pos_enc in args.pos_enc:  # fail before the long computation
            timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **SIZE)
        splits = list(load_cifar10_splits(args.data_dir).values())[:2]
        train_set, test_set = (CIFAR10Position(split, seed=args.seed + i) for i, split in enumerate(splits))
        images, labels = tensors(train_set, args.train_images, args.seed)
        test_images, test_labels = tensors(test_set, args.test_images, args.seed)
        args.output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    dependent = [label in train_set.position_labels for label in range(len(train_set.classes))]

    results, rows = [], []
    for pos_enc in args.pos_enc:
        random_seed(args.seed)
        model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **SIZE)
        train(model, images, labels, args.epochs, pos_enc)
        found = position_shap(
            model.eval(), zip(test_images.split(BATCH), test_labels.split(BATCH)), progress=f'P-SHAP of {pos_enc}')
        is_dependent = torch.tensor(dependent)[found.labels]
        with_bias, without = (
            found.values[found.correct & found.values.isfinite() & (is_dependent == which)] for which in (True, False))
        if not len(with_bias) or not len(without):
            parser.error(f'{pos_enc} classifies no test image of one kind correctly; train for more epochs')
        u, p = mannwhitneyu(with_bias.double().numpy(), without.double().numpy(), alternative='greater')
        results.append((pos_enc, found, dependent, p))
        rows.append({
            'encoding': pos_enc, 'top-1': f'{100 * found.correct.float().mean():.1f}',
            'correct, position-dependent': len(with_bias), 'correct, independent': len(without),
            'P-SHAP, position-dependent': f'{with_bias.mean():.4f}', 'P-SHAP, independent': f'{without.mean():.4f}',
            'P(dependent > independent)': f'{u / (len(with_bias) * len(without)):.3f}',
            'p, one-sided': f'{p:.1e}',
            'verdict at .01': 'higher' if p < 0.01 else 'not shown',
        })

    notes = (
        f'{len(labels)} training and {len(test_labels)} test images of CIFAR-10-Position, {args.epochs} epochs, '
        f'seed {args.seed}; {about(torch.device("cpu"))}')
    write_csv(rows, table, notes)
    draw(picture, results, train_set.classes)
    print(markdown(rows), notes, sep='\n\n')
    print(f'\n{table}\n{picture}')


if __name__ == '__main__':
    main()
