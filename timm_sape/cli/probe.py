"""`timm-sape probe`: how much the output of models changes when an image moves."""
import argparse
from typing import Any, Dict, List

from .common import CommandError, add_command
from .data_options import MODELS_HELP, add_image_options, chosen_encoding, image_size, readable, seed, seen
from .files import TABLES, add_output_options, check_outputs, interruptible, table_writer, write_files

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'probe', interruptible(_probe),
        summary='Shift, mirror, permute and scale an image, and compare how models change with what theory says.',
        examples="""\
examples:
  timm-sape probe output/exp/model_best.pth.tar --image cat.jpg
  timm-sape probe test_vit_pos_enc --pos-enc nope ape rope2d sape2_k --randomize --image cat.jpg --output probe.csv
  timm-sape probe vit_small_patch16_224 hf-hub:USER/MODEL --image cat.jpg

change is |after - before| / |before| in float64, with patches moved back to their places. Where theory predicts it,
expected is 0 or `changes`, and verdict is pass or fail; elsewhere both are empty. The exit code is 1 if one failed.""",
    )
    parser.add_argument('models', nargs='+', metavar='MODEL', help=MODELS_HELP)
    add_image_options(parser)
    parser.add_argument('--pos-enc', nargs='+', metavar='NAME', help='use each of these as the encoding of MODEL')
    parser.add_argument(
        '--randomize', action='store_true',
        help='randomize the parameters of encodings; those that are initialized to zero have no effect otherwise')
    parser.add_argument(
        '--seed', type=seed, default=0, help='of weights, noise and permutations (default: %(default)s)')
    add_output_options(parser)


def _probe(args: argparse.Namespace) -> int:
    check_outputs([args.output], args.force, TABLES)
    size = image_size(args)

    import torch
    from tqdm import tqdm

    from ..analysis import probe, randomize_encodings
    from ..host import PosEncModel
    from ..lab.machine import about
    from ..lab.tables import markdown
    from ..loading import ImageFile, load_model, preprocessing

    cases = [(model, pos_enc) for model in args.models for pos_enc in args.pos_enc or [None]]
    rows: List[Dict[str, Any]] = []
    for model_name, pos_enc in tqdm(cases, desc='probes', unit='model', delay=2):
        with readable():
            torch.manual_seed(args.seed)
            model = load_model(model_name, size, **chosen_encoding(pos_enc))
            if args.randomize:
                if not isinstance(model, PosEncModel):
                    raise CommandError(f'--randomize is only for models of timm_sape; leave it out for {model_name}')
                randomize_encodings(model, seed=args.seed)
            image, _ = ImageFile(args.image, preprocessing(model, size, crop_mode='squash'))[0]
            found = probe(model, image[None], args.seed)
        name = pos_enc or model_name
        if pos_enc is not None and len(args.models) > 1:
            name = f'{model_name}, {pos_enc}'
        rows += [
            {
                'model': name, 'probe': row.probe, 'of': row.what, 'change': row.change,
                'expected': row.expected, 'verdict': row.verdict,
            }
            for row in found]
    verdicts = [row['verdict'] for row in rows if row['verdict']]
    holding = f'{verdicts.count("pass")} of {len(verdicts)} theorems hold' if verdicts else 'no theorems for this'
    weights = ', encodings randomized' if args.randomize else ''
    notes = (
        f'{seen(args.image, size)}, {", ".join(args.models)}{weights}, seed {args.seed}: {holding}; '
        f'{about(torch.device("cpu"))}')
    table = markdown([{**row, 'change': f'{row["change"]:.2e}'} for row in rows])
    write_files({args.output: table_writer(rows, notes, table)}, args.force)
    print(table, notes, sep='\n\n')  # last: it fails if a pipe was closed
    return 1 if 'fail' in verdicts else 0
