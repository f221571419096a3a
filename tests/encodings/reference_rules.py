"""Rules for other sizes than the trained one, in float64 loops.

'rescale' is position interpolation (Chen et al. 2023, 2306.15595); 'ntk' and 'yarn' are NTK-aware interpolation,
NTK-by-parts and the temperature of YaRN (Peng et al. 2023, 2309.00071), for each axis. The temperature has the larger
stretch, as in FiT (Lu et al. 2024, 2402.12376).

w is a frequency as it was trained, s the stretch: the size over the trained size, which is `length`.
"""
import math

import torch

from loops import attention, rotated


def series(t, n, base, s=1):
    """Frequency t of n in a geometric series, after its base b has become b * s^(n/(n-1))."""
    return (base * s ** (n / (n - 1))) ** (-t / n)


def by_parts(w, s, turns, ramp):
    """gamma is 1 for the wavelengths far below the trained length, which stay, and 0 for those far above it."""
    low, high = ramp
    gamma = 0 if turns < low else 1 if turns > high else (turns - low) / (high - low)
    return (1 - gamma) * w / s + gamma * w


def temperature(rule, *stretches):
    """1/t, what the logits are multiplied by."""
    s = max(stretches)
    return (0.1 * math.log(s) + 1) ** 2 if rule == 'yarn' and s > 1 else 1


def angle(place, w, changed):
    """Places are measured from the edge of the image, half a patch before the first centre."""
    return (place + 0.5) * changed - 0.5 * w


def fixed(rule, t, n, base, s, length, ramp):
    """Frequency t of n, as it was trained and by the rule."""
    w = series(t, n, base)
    if rule == 'rescale':
        return w, w / s
    return w, series(t, n, base, s) if rule == 'ntk' else by_parts(w, s, length * w / (2 * math.pi), ramp)


def attend(q, k, v, angle_of, factor, grid_size, bias=None, rotate_half=False, **where):
    """softmax(factor * Rq.Rk / sqrt(d) + bias) v, with angles `angle_of(h, t, y, x)`."""
    q, k = (rotated(x, angle_of, grid_size, rotate_half=rotate_half, **where) for x in (q, k))
    return attention(q, k, v, scale=factor / math.sqrt(q.shape[-1]), bias=bias)


def rope2d(rule, dim, size, ref, ramp=(1, 32), gate=1):
    """The first half of the pairs turns with x, the second with y."""
    n = dim // 4
    stretch = [new / old for new, old in zip(size, ref)]

    def angle_of(h, pair, y, x):
        axis, place, t = (1, x, pair) if pair < n else (0, y, pair - n)
        return gate * angle(place, *fixed(rule, t, n, 100, stretch[axis], ref[axis], ramp))

    return angle_of, temperature(rule, *stretch)


def mrope(rule, dim, size, ref, ramp=(1, 32)):
    """In its default layout: time, y and x in turn, with the frequencies of one series."""
    n = dim // 2
    stretch = [new / old for new, old in zip(size, ref)]

    def angle_of(h, t, y, x):
        if t % 3 == 0:
            return 0.
        axis, place = (0, y) if t % 3 == 1 else (1, x)
        return angle(place, *fixed(rule, t, n, 10000, stretch[axis], ref[axis], ramp))

    return angle_of, temperature(rule, *stretch)


def rope1d(rule, dim, size, ref, ramp=(1, 32)):
    """One axis, along the raster, where places are measured from the first patch."""
    n, length = dim // 2, ref[0] * ref[1]
    s = size[0] * size[1] / length

    def angle_of(h, t, y, x):
        return (y * size[1] + x) * fixed(rule, t, n, 10000, s, length, ramp)[1]

    return angle_of, temperature(rule, s)


def oblique(rule, place, frequency, e, stretch, ref, ramp):
    """The angle of a pair with a frequency along y and one along x, given the exponent `e` of NTK-aware.

    A pair turns most between two opposite corners.
    """
    turns = sum(size * abs(f) for size, f in zip(ref, frequency)) / (2 * math.pi)
    total = 0
    for p, f, s in zip(place, frequency, stretch):
        changed = f / s if rule == 'rescale' else f * s ** -e if rule == 'ntk' else by_parts(f, s, turns, ramp)
        total = total + angle(p, f, changed)
    return total


def rope2d_mixed(rule, freqs, size, ref, ramp=(1, 32)):
    """Learned frequencies along x and y, `[2, h, d/2]`; the initial ones have n lengths, from a base of 10.

    NTK-aware treats one as the initial frequency of its length.
    """
    n = freqs.shape[-1] // 2
    stretch = [new / old for new, old in zip(size, ref)]
    shortest = series(n - 1, n, 10)

    def angle_of(h, t, y, x):
        fx, fy = freqs[0, h, t], freqs[1, h, t]
        length = torch.sqrt(fx * fx + fy * fy)
        e = 0 if length > 1 else 1 if length < shortest else torch.log(length) / math.log(shortest)
        return oblique(rule, (y, x), (fy, fx), e, stretch, ref, ramp)

    return angle_of, temperature(rule, *stretch)


def along_directions(rule, wave, size, ref, ramp):
    """Fixed frequencies; `wave(h, pair)` is the direction of a pair, its frequency, and the exponent of NTK-aware."""
    stretch = [new / old for new, old in zip(size, ref)]

    def angle_of(h, pair, y, x):
        direction, w, e = wave(h, pair)
        return oblique(rule, (y, x), (w * math.sin(direction), w * math.cos(direction)), e, stretch, ref, ramp)

    return angle_of, temperature(rule, *stretch)


def rope_spiral(rule, dim, size, ref, ramp=(1, 32)):
    """Four directions."""
    n = dim // 4

    def wave(h, pair):
        half, t = divmod(pair, n)
        return (1 - half) * math.pi / 2 - t // 2 % 2 * math.pi / 4, 1.5 * series(t, n, 10000), t / (n - 1)

    return along_directions(rule, wave, size, ref, ramp)


def rope_nd(rule, dim, size, ref, ramp=(1, 32)):
    """Two heads, with three corners of a triangle for each frequency; the second head has it turned by 30 degrees."""
    n = dim // 6

    def wave(h, pair):
        corner, t = divmod(pair, n)
        return math.radians(120 * corner + 30 * h), series(t, n, 100), t / (n - 1)

    return along_directions(rule, wave, size, ref, ramp)
