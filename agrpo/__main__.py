"""`python -m agrpo` is the `agrpo` command."""

from agrpo.cli import main

if __name__ == "__main__":
    main()
