r"""Fine-tune a NaFlexVit on a folder of images, each in its own aspect ratio, by timm's NaFlex loader.

    python examples/native_aspect.py
    python examples/native_aspect.py --data-dir DATA --model naflexvit_small_rope2d --kwargs '{"img_size": 224}' \
        --patches 196 --opt adamw --lr 1e-3

DATA has `train` and `val`, each with a sub-folder of images per class. Without it, the images are drawn: a bright
square at one of the four sides of a noisy image, whose size and shape are random. That takes seconds on a CPU.

To fine-tune a saved model: `--model local-dir:FOLDER --pretrained --kwargs '{}'`. To fine-tune one of timm's with an
encoding grafted onto it: `--model vit_graft --pretrained` and
`--kwargs '{"base": "vit_small_patch16_224", "pos_enc": "sape2_k", "use_naflex": true}'`. The defaults of the other
options suit the drawn images. To both of these add, say, `--patches 196 --opt adamw --lr 1e-4`.
"""
import argparse
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from timm.data import create_naflex_loader, resolve_model_data_config
from timm.models.naflexvit import NaFlexVit
from timm.optim import create_optimizer_v2

import timm_sape  # noqa: F401  registers the models
from timm_sape.loading import open_dataset

SIDES = {'left': (0, 0.5), 'right': (1, 0.5), 'top': (0.5, 0), 'bottom': (0.5, 1)}  # (x, y) of the square
SMALL = {'img_size': 32, 'patch_size': 4, 'global_pool': 'avg', 'fc_norm': True}


def draw(folder, per_class):
    """Write images of 24 to 64 pixels a side."""
    generator = random.Random(0)
    for split, number in (('train', per_class), ('val', per_class // 2)):
        for side, (x, y) in SIDES.items():
            (folder / split / side).mkdir(parents=True)
            for i in range(number):
                width, height = generator.randint(24, 64), generator.randint(24, 64)
                image = Image.effect_noise((width, height), 30)
                left, top = round(x * (width - 10)), round(y * (height - 10))
                ImageDraw.Draw(image).rectangle((left, top, left + 9, top + 9), fill=255)
                image.convert('RGB').save(folder / split / side / f'{i}.png')


def make_loader(data, model, is_training, args):
    config = resolve_model_data_config(model)
    return create_naflex_loader(
        data,
        patch_size=model.embeds.patch_size,
        train_seq_lens=(args.patches // 2, args.patches),  # a batch has one of these lengths
        max_seq_len=args.patches,
        batch_size=args.batch_size,
        is_training=is_training,
        scale=(0.8, 1),  # crops keep most of an image, and nearly its aspect ratio
        ratio=(0.9, 1.1),
        hflip=0 if args.data_dir is None else 0.5,  # it would exchange left and right
        mean=config['mean'],
        std=config['std'],
        interpolation='bicubic',
        num_workers=args.workers,
        device=torch.device(args.device),
        pin_memory=False,
    )


@torch.inference_mode()
def accuracy(model, loader):
    found = [(model(batch).argmax(1) == labels).float() for batch, labels in loader]
    return 100 * torch.cat(found).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data-dir', type=Path, help='folder with train and val (default: drawn images)')
    parser.add_argument('--model', default='test_naflexvit_sape2_k_ape')
    parser.add_argument('--kwargs', type=json.loads, default=SMALL, help='of timm.create_model, JSON')
    parser.add_argument('--pretrained', action='store_true')
    parser.add_argument('--patches', type=int, default=64, help='at most so many in an image')
    parser.add_argument('--epochs', type=int, default=8)
    parser.add_argument('--opt', default='muon')
    parser.add_argument('--lr', type=float, default=0.02)
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--workers', type=int, default=0)
    parser.add_argument('--device', default='cpu')
    args = parser.parse_args()
    if args.patches < 2:
        parser.error('--patches must be at least 2; some batches have half as many')
    torch.manual_seed(0)
    with TemporaryDirectory() as drawn:
        if args.data_dir is None:
            draw(Path(drawn), per_class=64)
        try:
            data, test_data = (open_dataset(str(args.data_dir or drawn), split=split) for split in ('train', 'val'))
            model = timm.create_model(args.model, args.pretrained, num_classes=len(data.by_name), **args.kwargs)
            if not isinstance(model, NaFlexVit):
                raise ValueError(f'{args.model} takes images of one size; name a NaFlexVit, like naflexvit_tiny_ape')
        except (ValueError, OSError, RuntimeError) as e:  # the last from timm, of an unknown model
            parser.error(str(e))
        model.to(args.device)
        loader, test_loader = make_loader(data, model, True, args), make_loader(test_data, model, False, args)
        optimizer = create_optimizer_v2(model, args.opt, lr=args.lr, weight_decay=0.05)
        for epoch in range(args.epochs):
            loader.dataset.set_epoch(epoch)  # other batches, of other lengths
            model.train()
            for batch, labels in loader:
                loss = F.cross_entropy(model(batch), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f'epoch {epoch + 1}: loss {loss.item():.3f}, top-1 {accuracy(model.eval(), test_loader):.1f} %')


if __name__ == '__main__':
    main()
