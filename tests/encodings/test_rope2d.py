"""rope2d: rotation by x in one half of the channels and by y in the other."""
import reference_rope2d
from rotation_checks import FixedTableTests, ResolutionTests


class TestRope2d(ResolutionTests, FixedTableTests):
    name = 'rope2d'
    reference = reference_rope2d
