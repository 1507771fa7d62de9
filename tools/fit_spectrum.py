"""The power of a VAE's latents by frequency, for model.spectrum: a power law through the latents of real videos.

    python run.py model=wan22_ti2v_5b pipeline=v2v stages=[encode] resolution=704p video=clip.mp4       # for each video
    python tools/fit_spectrum.py outputs/*/*/encode.safetensors

Frequencies are counted in waves across the latents. The published fit of Wan 2.1's VAE is of 9,050 videos.
"""
import sys

import numpy
from safetensors.numpy import load_file


def spectrum(latents: numpy.ndarray) -> numpy.ndarray:
    """Mean power of latents (…, height, width) at 1, 2, … waves across the shorter side."""
    height, width = latents.shape[-2:]
    power = numpy.abs(numpy.fft.fft2(latents, norm="ortho")) ** 2
    shorter = min(height, width)
    waves = [numpy.fft.fftfreq(side) * shorter for side in (height, width)]
    ring = numpy.rint(numpy.hypot(waves[0][:, None], waves[1][None])).astype(int)
    mean = power.reshape(-1, height, width).mean(axis=0)
    return numpy.array([mean[ring == frequency].mean() for frequency in range(1, shorter // 2 + 1)])


def fit(powers: numpy.ndarray) -> tuple[float, float]:
    """Amplitude and exponent of amplitude / frequency^exponent, by least squares of the logarithms."""
    frequencies = numpy.arange(1, len(powers) + 1)
    slope, start = numpy.polyfit(numpy.log(frequencies), numpy.log(powers), 1)
    return float(numpy.exp(start)), float(-slope)


def main() -> None:
    videos = [load_file(path)["video_latents"] for path in sys.argv[1:]]
    if not videos:
        sys.exit(__doc__)
    amplitude, exponent = fit(numpy.mean([spectrum(latents) for latents in videos], axis=0))
    print(f"{len(videos)} videos: model.spectrum=[{amplitude:.4g},{exponent:.4g}]")


if __name__ == "__main__":
    main()
