"""Push a model to the Hugging Face Hub and pull it back, in two processes or on two machines.

    python examples/push_pull.py push OWNER/NAME
    python examples/push_pull.py pull OWNER/NAME

`push` trains a small model on scikit-learn's handwritten digits for a few seconds, tests it on 360 of them, and pushes
it with a model card. `pull` loads it and tests it on the same digits. On the same kind of machine every logit is the
same, bit for bit, and so both print the same checksum of all logits. Set HF_TOKEN or log in with `hf auth login`. To
use another Hub than huggingface.co, set HF_ENDPOINT.
"""
import argparse
import hashlib

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import timm_sape

ARCHITECTURE = 'test_vit_sape2_k_ape'
SIZE = dict(
    img_size=8, patch_size=2, in_chans=1, num_classes=10, class_token=False, global_pool='avg', embed_dim=32, depth=2,
    num_heads=2)
DATA = dict(input_size=(1, 8, 8), mean=(0.5,), std=(0.5,), interpolation='bilinear', crop_pct=1.0)


def digits():
    """Images `[n, 1, 8, 8]` from -1 to 1 and labels `[n]`, for training and for the test."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    order, test = train_test_split(range(len(images)), test_size=360, random_state=0, stratify=data.target)
    labels = torch.from_numpy(data.target)
    return (images[order], labels[order]), (images[test], labels[test])


def train(model, images, labels, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def test(model, images, labels):
    """Top-1 in percent, and a checksum of all logits."""
    logits = model.eval()(images)
    top1 = 100 * (logits.argmax(1) == labels).double().mean().item()
    return round(top1, 1), hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('command', choices=['push', 'pull'])
    parser.add_argument('repo_id', metavar='OWNER/NAME')
    parser.add_argument('--epochs', type=int, default=12, help='of training, for push (default: %(default)s)')
    parser.add_argument('--private', action='store_true', help='make a new repository private')
    args = parser.parse_args()
    torch.manual_seed(0)
    train_set, test_set = digits()
    try:
        if args.command == 'push':
            model = timm.create_model(ARCHITECTURE, **SIZE)
            train(model, *train_set, args.epochs)
            top1, checksum = test(model, *test_set)
            commit = timm_sape.hub.push(
                model,
                args.repo_id,
                private=args.private,
                recipe={'optimizer': 'AdamW', 'learning rate': 2e-3, 'batch size': 64, 'epochs': args.epochs},
                data="scikit-learn's digits: 1,437 to train, 360 to test",
                results={'top-1 on the test images': f'{top1} %'},
                data_config=DATA,
            )
            print(f'pushed {commit.oid[:8]}')
        else:
            model = timm_sape.hub.load(args.repo_id)
            print(f'pulled a model with pos_enc={model.pos_enc!r}')
            top1, checksum = test(model, *test_set)
    except (ValueError, OSError) as e:
        parser.exit(1, f'{e}\n')
    print(f'top-1 {top1} %, checksum of the logits {checksum}')


if __name__ == '__main__':
    main()
