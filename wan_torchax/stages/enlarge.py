"""Noisy latents of half height and width to the full size: their frequencies are kept, and fresh noise is put above."""
import numpy


def enlarged(latents: numpy.ndarray, noise: numpy.ndarray, sigma: float) -> numpy.ndarray:
    """(…, height, width) to the shape of the noise (…, 2 · height, 2 · width), at noise level `sigma`.

    A picture of half the sides has half the orthonormal DCT coefficients. So latents (1 - s) x + s n become
    (1 - s) x / 2 + s n of the full size. Times 2 / (1 + s) these are latents at noise level sigma = 2s / (1 + s); that
    factor is 2 - sigma, and fresh noise of s times it is of sigma.
    """
    height, width = latents.shape[-2:]
    frequencies = numpy.float32(sigma) * noise
    frequencies[..., :height, :width] = numpy.float32(2 - sigma) * (cosines(height) @ latents @ cosines(width).T)
    return cosines(2 * height).T @ frequencies @ cosines(2 * width)


def cosines(size: int) -> numpy.ndarray:
    """(size, size): the orthonormal DCT-II; its transpose is the inverse."""
    places = numpy.arange(size)
    matrix = numpy.sqrt(2 / size) * numpy.cos(numpy.pi * places[:, None] * (2 * places + 1) / (2 * size))
    matrix[0] /= numpy.sqrt(2)
    return matrix.astype(numpy.float32)
