"""rope2d_mixed: rotation by learned mixtures of x and y."""
import reference_rope2d_mixed
from model_checks import LearnedTests
from rotation_checks import MixedTests, ResolutionTests, TableTests


class TestRope2dMixed(ResolutionTests, MixedTests, LearnedTests, TableTests):
    name = 'rope2d_mixed'
    reference = reference_rope2d_mixed
