"""Experiments: train models with several seeds by one recipe, through timm's train.py, and compare the results."""
from .plan import ARCHIVE, OUTPUTS, SPLITS, Plan, Run, import_modules, load_plan, script_options
from .records import Trained, alone, hash_of, lock, shape_of, trained_models, write_text
from .report import notes_of, plot_curves, rows_of, summary_table, trained_with
from .results import archive_runs, read_results
from .runner import Slot, check_splits, images_in, make_slots, refuse_begun_otherwise, refuse_other_images, run_all
from .trial import estimate

__all__ = [
    'ARCHIVE',
    'OUTPUTS',
    'SPLITS',
    'Plan',
    'Run',
    'Slot',
    'Trained',
    'alone',
    'archive_runs',
    'check_splits',
    'estimate',
    'hash_of',
    'images_in',
    'import_modules',
    'load_plan',
    'lock',
    'make_slots',
    'notes_of',
    'plot_curves',
    'read_results',
    'refuse_begun_otherwise',
    'refuse_other_images',
    'rows_of',
    'run_all',
    'script_options',
    'shape_of',
    'summary_table',
    'trained_models',
    'trained_with',
    'write_text',
]
