"""Load the models and images that users name, in a command or in Python."""
from .classes import check_classes, check_numbering, number_classes
from .images import ImageFile, in_order, is_torchvision, load_images, open_dataset, reads_folders, split_folder
from .models import load_model, why_unknown
from .preprocess import image_size_of, native_preprocessing, patch_ratio, patch_size_of, preprocessing

__all__ = [
    'ImageFile',
    'check_classes',
    'check_numbering',
    'image_size_of',
    'in_order',
    'is_torchvision',
    'load_images',
    'load_model',
    'native_preprocessing',
    'number_classes',
    'open_dataset',
    'patch_ratio',
    'patch_size_of',
    'preprocessing',
    'reads_folders',
    'split_folder',
    'why_unknown',
]
