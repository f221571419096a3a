"""Write the ImageFolder that .ci/full needs: the first 200 training and 50 test images of each class of CIFAR-10.

    python .ci/make_cifar10_small.py ROOT OUT     (downloads CIFAR-10 to ROOT unless it is there)
"""
import sys
from collections import Counter
from pathlib import Path

from torchvision.datasets import CIFAR10

root, out = map(Path, sys.argv[1:])
for split, per_class in (('train', 200), ('test', 50)):
    data = CIFAR10(root, train=split == 'train', download=True)
    seen = Counter()
    for image, label in data:
        if seen[label] < per_class:
            folder = out / split / data.classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f'{seen[label]:03}.png')
            seen[label] += 1
