"""Export a model to ONNX, and compare it in ONNX Runtime with the original on real images.

    python examples/export.py local-dir:quickstart_output/test_vit_sape2_k_ape --images FILE_OR_FOLDER
    python examples/export.py hf-hub:USER/REPOSITORY --images FOLDER --dynamic-size --output model.onnx

The batch size is dynamic. With `--dynamic-size` so are height and width, in multiples of the patch size; each encoding
then follows its rule for other grids. timm's own `onnx_export` does the export, through torch.export. The exported
model contains only standard ONNX operators, so any ONNX runtime can run it without this package. The file is moved to
`--output` only after the check, and then replaces one that is there. Needs `pip install onnx onnxscript onnxruntime`.
"""
import argparse
import tempfile
from pathlib import Path

import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from timm.utils.onnx import onnx_export

from timm_sape.loading import load_images, load_model, open_dataset, patch_size_of, preprocessing

TOLERANCE = 1e-4


def sizes_to_check(model, images, dynamic_size):
    """Image sizes (height, width) to check: the model's own, and with a dynamic size a larger one of another shape."""
    height, width = images.shape[-2:]
    patch_height, patch_width = patch_size_of(model)
    return [(height, width)] + ([(height + patch_height, width + 3 * patch_width)] if dynamic_size else [])


@torch.no_grad()
def compare(model, session, images, size):
    """Run the model and the exported session on a batch, and on its first image alone.

    Returns:
        Logits of the model, `[B, classes]`, and the largest absolute difference of the session's logits.
    """
    images = F.interpolate(images, size, mode='bilinear', antialias=True)
    logits = model(images)
    differences = []
    for part in (slice(0, 1), slice(None)):
        found, = session.run(None, {session.get_inputs()[0].name: images[part].numpy()})
        differences.append((torch.from_numpy(found) - logits[part]).abs().max())
    return logits, torch.stack(differences).max().item()  # Python's max would lose a NaN


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model', help='a name that timm knows, hf-hub:..., local-dir:..., or a checkpoint of train.py')
    parser.add_argument('--images', required=True, help='an image, or a folder of them, to check the export on')
    parser.add_argument('--num-images', type=int, default=8, help='how many of the folder')
    parser.add_argument('--dynamic-size', action='store_true', help='take images of other sizes too')
    parser.add_argument('--output', type=Path, default=Path('model.onnx'))
    args = parser.parse_args()
    if args.num_images < 1:
        parser.error('--num-images must be 1 or more')
    if args.output.is_dir():
        parser.error(f'--output {args.output} is a folder; name a file')
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        model = load_model(args.model, **({'dynamic_img_size': True} if args.dynamic_size else {}))
        dataset = open_dataset(args.images, transform=preprocessing(model))
        images, _ = next(iter(load_images(dataset, args.num_images, args.num_images)))
        sizes = sizes_to_check(model, images, args.dynamic_size)
    except (ValueError, OSError) as e:
        parser.error(str(e))

    with tempfile.TemporaryDirectory(dir=args.output.parent) as folder:
        path = Path(folder) / args.output.name
        onnx_export(model, str(path), images[:1], dynamic_size=args.dynamic_size, use_dynamo=True)
        session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
        print('| images | height x width | largest logit | largest difference |\n|---|---|---|---|')
        for size in sizes:
            logits, difference = compare(model, session, images, size)
            print(f'| {len(images)} | {size[0]} x {size[1]} | {logits.abs().max():.3f} | {difference:.1e} |')
            if not difference <= TOLERANCE:  # true for NaN too
                raise SystemExit(
                    f'Its logits differ from those of the model by more than {TOLERANCE}: {args.output} not written.')
        exported = onnx.load(path, load_external_data=False)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # weights over 2 GB are a file of their own: first
            file.replace(args.output.parent / file.name)

    size = ', '.join(str(d.dim_param or d.dim_value) for d in exported.graph.input[0].type.tensor_type.shape.dim)
    opsets = ', '.join(f'{opset.domain or "ONNX"} {opset.version}' for opset in exported.opset_import)
    print(f'\n{args.output}: input [{size}], {len(exported.graph.node)} nodes, operators of {opsets}')


if __name__ == '__main__':
    main()
