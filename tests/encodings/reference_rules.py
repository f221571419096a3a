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


def rope2d_mixed(rule, freqs, size, ref, ramp=(1, 32)):
    """Learned frequencies along x and y, `[2, h, d/2]`; the initial ones have n lengths, from a base of 10.

    NTK-aware treats one as the initial frequency of its length. A pair turns most between two opposite corners.
    """
    n = freqs.shape[-1] // 2
    sy, sx = (new / old for new, old in zip(size, ref))
    shortest = series(n - 1, n, 10)

    def angle_of(h, t, y, x):
        fx, fy = freqs[0, h, t], freqs[1, h, t]
        if rule == 'rescale':
            return angle(x, fx, fx / sx) + angle(y, fy, fy / sy)
        if rule == 'ntk':
            length = torch.sqrt(fx * fx + fy * fy)
            e = 0 if length > 1 else 1 if length < shortest else torch.log(length) / math.log(shortest)
            return angle(x, fx, fx * sx ** -e) + angle(y, fy, fy * sy ** -e)
        turns = (ref[1] * abs(fx) + ref[0] * abs(fy)) / (2 * math.pi)
        return angle(x, fx, by_parts(fx, sx, turns, ramp)) + angle(y, fy, by_parts(fy, sy, turns, ramp))

    return angle_of, temperature(rule, sy, sx)


def rope_spiral(rule, dim, size, ref, ramp=(1, 32)):
    """Four directions. A pair turns with the parts of its frequency w along x and along y."""
    n = dim // 4
    sy, sx = (new / old for new, old in zip(size, ref))

    def angle_of(h, pair, y, x):
        half, t = divmod(pair, n)
        direction = (1 - half) * math.pi / 2 - t // 2 % 2 * math.pi / 4
        w = 1.5 * series(t, n, 10000)
        fx, fy = w * math.cos(direction), w * math.sin(direction)
        if rule == 'rescale':
            return angle(x, fx, fx / sx) + angle(y, fy, fy / sy)
        if rule == 'ntk':
            e = t / (n - 1)
            return angle(x, fx, fx * sx ** -e) + angle(y, fy, fy * sy ** -e)
        turns = (ref[1] * abs(fx) + ref[0] * abs(fy)) / (2 * math.pi)
        return angle(x, fx, by_parts(fx, sx, turns, ramp)) + angle(y, fy, by_parts(fy, sy, turns, ramp))

    return angle_of, temperature(rule, sy, sx)
