"""Train a ranker: ``python train.py --help``. The same as ``lgmml train``."""

from lgmml_torch.app.start import main

if __name__ == "__main__":
    main()
