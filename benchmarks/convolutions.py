"""Forms of a stacked convolution on CUDA: grouped (what vmap makes) against unfolded products.

    PYTHONPATH=src python benchmarks/convolutions.py

Samples per second of one FedAvg round, captured; and how far the two forms differ in float64.
"""

import torch
from gpu_check import federation, milliseconds, simulation

from idiolect.models import MODELS
from idiolect.models.convolution import unfold_convolutions
from idiolect.simulate.backend import Backend


def main() -> None:
    for model, shape in (("lenet5", (3, 32, 32)), ("mcmahan-cnn", (1, 28, 28))):
        for clients, batch in ((20, 20), (20, 100), (50, 128)):
            fed = federation([600] * clients, shape)
            for form in ("grouped", "unfolded"):
                for tf32 in (False, True):

                    def build(model=model, shape=shape, form=form):
                        network = MODELS[model](shape, 10)
                        if form == "unfolded":
                            unfold_convolutions(network)
                        return network

                    sim = simulation("fedavg", fed, build, Backend(device="cuda"), batch=batch)
                    torch.backends.cudnn.allow_tf32 = tf32
                    torch.backends.cuda.matmul.allow_tf32 = tf32
                    took = milliseconds(sim, 8)
                    rate = clients * 600e3 / took
                    print(
                        f"{model} {clients} x {batch} {form} tf32={tf32}: {took:.2f} ms "
                        f"{rate:,.0f} samples/s {torch.cuda.max_memory_allocated() >> 20} MiB",
                        flush=True,
                    )
                    del sim
                    torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
