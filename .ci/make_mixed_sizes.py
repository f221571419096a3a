"""Copies an ImageFolder of CIFAR-10 with its images cropped to many aspect ratios and enlarged to many sizes.

python .ci/make_mixed_sizes.py SOURCE TARGET: deterministic, the same files at each run.
"""
import random
import sys
from pathlib import Path

from PIL import Image


def main(source: Path, target: Path) -> None:
    generator = random.Random(0)
    for path in sorted(source.glob('*/*/*')):
        image = Image.open(path).convert('RGB')
        height, width = generator.choice(((32, 32), (32, 24), (24, 32), (32, 18), (18, 32)))
        left, top = generator.randint(0, 32 - width), generator.randint(0, 32 - height)
        image = image.crop((left, top, left + width, top + height))
        scale = generator.uniform(1, 2)
        image = image.resize((round(width * scale), round(height * scale)), Image.BICUBIC)
        out = target / path.relative_to(source).with_suffix('.png')
        out.parent.mkdir(parents=True, exist_ok=True)
        image.save(out)


if __name__ == '__main__':
    main(Path(sys.argv[1]), Path(sys.argv[2]))
