"""`lockstep report`: one self-contained HTML file about a training run or several, their curves and parity checks."""
