"""Train a ranker: ``python train.py --help``. The same as ``lgmml train``."""

from lgmml_torch.app.start import program

if __name__ == "__main__":
    program()
