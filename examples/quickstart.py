"""Quick start: train SaPE2(K)+APE, APE and no encoding, save and load a model, and draw what looks near and far to it.

    python examples/quickstart.py

No download is needed: the images are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. With patches of one pixel
the model sees 64 tokens. A single pixel says next to nothing, so everything depends on positions. Loader, optimizer,
scheduler, metrics and checkpoints are timm's. It takes two to five minutes on two CPU cores.
"""
import argparse
from pathlib import Path
from statistics import mean

import numpy as np
import timm
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from timm.data import create_loader
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, accuracy, random_seed
from tqdm import tqdm

import timm_sape  # noqa: F401  registers the models
from timm_sape.analysis import position_maps
from timm_sape.lab.intervals import spread

SAPE2 = 'test_vit_sape2_k_ape'
MODELS = {'test_vit_nope': 'no position', 'test_vit_ape': 'APE', SAPE2: 'SaPE2(K)+APE'}
DATA = dict(input_size=(1, 8, 8), mean=(0.5,), std=(0.5,), interpolation='bilinear', crop_pct=1.0)
SIZE = dict(
    img_size=8, patch_size=1, in_chans=1, num_classes=10, class_token=False, global_pool='avg',
    embed_dim=32, depth=3, num_heads=2, mlp_ratio=2)


class Digits(torch.utils.data.Dataset):
    """A data set for timm's `create_loader`, which sets `transform`."""
    transform = None

    def __init__(self, images, labels):
        self.images = [Image.fromarray((image * 255 / 16).astype(np.uint8)) for image in images]
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


def make_loader(images, labels, batch_size, is_training=False):
    return create_loader(
        Digits(images, labels), batch_size=batch_size, is_training=is_training, no_aug=True, num_workers=0,
        device=torch.device('cpu'), **DATA)


def train(model, loader, epochs, folder, progress):
    """Train as timm's train.py does, and save a checkpoint with the state of the optimizer in `folder`."""
    # Muon, because AdamW needs several times as many epochs to learn the positions of one-pixel patches.
    optimizer = create_optimizer_v2(model, 'muon', lr=0.02, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimizer, 'cosine', num_epochs=epochs, warmup_epochs=epochs / 10, step_on_epochs=False,
        updates_per_epoch=len(loader))
    folder.mkdir(parents=True, exist_ok=True)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(folder), max_history=1)
    model.train()
    num_updates = 0
    for epoch in range(epochs):
        losses = AverageMeter()
        for images, labels in loader:
            scheduler.step_update(num_updates)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_updates += 1
            losses.update(loss.item(), len(labels))
        progress.set_postfix(loss=f'{losses.avg:.2f}')
        progress.update()
    saver.save_checkpoint(epochs - 1)


@torch.no_grad()
def predict(model, inputs):
    return model.eval()(inputs)


def position_bias(model, inputs):
    """Compute what SaPE2 adds to the attention logits, averaged over all layers and heads, `[B, N, N]`."""
    maps = position_maps(model.eval(), inputs)
    return torch.stack([layer.position for layer in maps.layers]).mean(dim=(0, 2)).numpy()


def ink_auroc(distances, ink, patches):
    """Compute how often ink is nearer than background to one ink patch per image, averaged over images.

    Args:
        distances: Distances between patches, `[B, N, N]`. That of a patch to itself is not used.
        ink: Whether a patch is ink, bool `[B, N]`.
        patches: Index of the ink patch of each image, `[B]`.

    Returns:
        1 if all ink is nearer, 0 if all ink is farther, 0.5 by chance.
    """
    aurocs = []
    for distance, is_ink, patch in zip(distances, ink, patches):
        others = np.arange(len(is_ink)) != patch
        aurocs.append(roc_auc_score(is_ink[others], -distance[patch, others]))
    return mean(aurocs)


def draw(path, image, rows, ink_patch, background_patch):
    """Draw the paper's Figure 4 for a digit: the image, the bias between its patches, and two rows of that as maps."""
    fig = Figure(figsize=(16, 4.4 * len(rows) + 0.6), layout='constrained')
    fig.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    fig.suptitle(
        'White is near, green is far, and far gets more attention: the bias is added to the logits. '
        'One scale for both rows.', fontsize='x-large')
    greens = dict(cmap='Greens', vmin=0, vmax=max(bias.max() for _, bias in rows))
    for part, (title, bias) in zip(fig.subfigures(len(rows), hspace=0.06), rows):
        part.suptitle(title, fontsize='x-large')
        digit, matrix, *maps = part.subplots(1, 4)
        digit.imshow(image, cmap='gray')
        digit.set_title('the digit and two of its patches')
        matrix.imshow(bias, **greens)
        matrix.set(title='bias between all patches, row by row', xlabel='to patch', ylabel='from patch')
        matrix.set(xticks=range(0, 64, 8), yticks=range(0, 64, 8))
        for ax, patch, colour, what in zip(maps, (ink_patch, background_patch), ('red', 'blue'), ('ink', 'background')):
            shown = ax.imshow(bias[patch].reshape(8, 8), **greens)
            ax.set_title(f'bias from the {colour} patch ({what})')
            for a in (digit, ax):
                y, x = divmod(patch, 8)
                a.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=colour, linewidth=3))
        for ax in (digit, *maps):
            ax.set(xlabel='x in patches', ylabel='y in patches', xticks=range(8), yticks=range(8))
        part.colorbar(shown, ax=[matrix, *maps], label='bias, in logits: more attention')
    fig.savefig(path, dpi=100)


def print_row(name, values, digits):
    """Print a row of a Markdown table: name, mean ± standard deviation, each value."""
    print(f'| {name} | {spread(values, digits)} | {", ".join(f"{value:.{digits}f}" for value in values)} |')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--output', type=Path, default=Path('quickstart_output'), help='folder for all files')
    parser.add_argument('--epochs', type=int, default=12, help='epochs of each training')
    parser.add_argument('--seeds', type=int, default=3, help='trainings of each model')
    args = parser.parse_args()
    if args.epochs < 1 or args.seeds < 1:
        parser.error('--epochs and --seeds must be 1 or more')
    torch.set_num_threads(1)  # the tensors are so small that more threads are slower

    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images, digits.target, test_size=500, stratify=digits.target, random_state=0)
    loader = make_loader(images, labels, batch_size=32, is_training=True)
    inputs, targets = next(iter(make_loader(test_images, test_labels, batch_size=len(test_labels))))

    # Use the first 100 held-out digits, and a random ink patch of each, chosen before any training. A pixel is ink if
    # it has at least half of the largest intensity, 16. The figure shows the first of these digits.
    pixels = test_images[:100].reshape(-1, 64)
    ink = pixels >= 8
    rng = np.random.default_rng(0)
    patches = [rng.choice(np.flatnonzero(is_ink)) for is_ink in ink]
    background_patch = rng.choice(np.flatnonzero(pixels[0] == 0))

    top1 = {name: [] for name in MODELS}
    trained, untrained = [], []  # biases of SaPE2, one array for each seed
    with tqdm(total=len(MODELS) * args.seeds * args.epochs, unit='epoch') as progress:
        for seed in range(args.seeds):
            for name in MODELS:
                progress.set_description(f'{MODELS[name]}, seed {seed}')
                random_seed(seed)  # the same initial backbone for all models ...
                model = timm.create_model(name, pretrained_cfg_overlay=DATA, **SIZE)
                if name == SAPE2:
                    untrained.append(position_bias(model, inputs[:100]))
                random_seed(seed)  # ... and the same order of images
                train(model, loader, args.epochs, args.output / 'training' / name / f'seed{seed}', progress)
                top1[name].append(accuracy(predict(model, inputs), targets)[0].item())
                if name == SAPE2:
                    trained.append(position_bias(model, inputs[:100]))

    print(f'\nTop-1 in percent on {len(test_labels)} held-out digits, {args.epochs} epochs:\n')
    print('| position encoding | mean | each seed |\n|---|---|---|')
    for name, values in top1.items():
        print_row(MODELS[name], values, 1)

    # Two plain distances for comparison.
    y, x = np.divmod(np.arange(64), 8)
    on_grid = np.hypot(y[:, None] - y, x[:, None] - x)
    distances = {
        'SaPE2 bias, trained': trained,
        'SaPE2 bias, untrained': untrained,
        'difference of the pixels': [np.abs(pixels[:, :, None] - pixels[:, None])],
        'distance on the grid': [np.broadcast_to(on_grid, (len(pixels), 64, 64))],
    }
    aurocs = {name: [ink_auroc(each, ink, patches) for each in runs] for name, runs in distances.items()}
    print(f'\nFrom a patch of ink, is ink nearer than background? AUROC over {len(ink)} held-out digits')
    print('(1: all ink nearer, 0: all ink farther, 0.5: chance)\n')
    print('| distance | mean | each seed |\n|---|---|---|')
    for name, values in aurocs.items():
        print_row(name, values, 3)
    side = 'nearer to' if mean(aurocs['SaPE2 bias, trained']) > 0.5 else 'farther from'
    print(f'\nIn the trained model ink is {side} ink than background is. Compare the rows before calling that learned.')
    print(f'Training changed the mean bias from {np.mean(untrained):.2f} to {np.mean(trained):.2f}. It is added to the '
          'logits (Eq. 16): what looks far gets more attention.')

    picture, checkpoint = args.output / 'figure4.png', args.output / SAPE2
    rows = []
    for state, biases in (('trained', trained), ('untrained', untrained)):
        auroc = aurocs[f'SaPE2 bias, {state}'][-1]
        rows.append((f'SaPE2(K)+APE, {state} (AUROC {auroc:.2f} over {len(ink)} digits)', biases[-1][0]))
    draw(picture, test_images[0], rows, patches[0], background_patch)

    save_for_hf(model, checkpoint, safe_serialization=True)  # the model that was trained last, with SaPE2
    reloaded = timm.create_model(f'local-dir:{checkpoint}', pretrained=True)
    if not torch.equal(predict(reloaded, inputs), predict(model, inputs)):
        raise RuntimeError(f'The model loaded from {checkpoint} does not give the same logits as the saved one.')

    print(f'\n{picture}: what looks near and far from two patches of a digit, trained and untrained')
    print(f'{checkpoint}: timm.create_model("local-dir:{checkpoint}", pretrained=True) gives the same logits')
    print(f'{args.output / "training"}: the last checkpoint of each training')


if __name__ == '__main__':
    main()
