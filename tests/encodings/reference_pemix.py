"""PEmixer (Li et al. 2024, arXiv:2410.06405): x * w_x + pe * w_pe, with a learned weight for each channel."""
from loops import stacked


def pemix(tokens, term, weight_x, weight_pe):
    """tokens * weight_x + term * weight_pe, channel by channel, for each token."""
    return stacked([
        [weight_x * token + weight_pe * row for token, row in zip(image.unbind(0), rows.unbind(0))]
        for image, rows in zip(tokens.unbind(0), term.expand_as(tokens).unbind(0))])
