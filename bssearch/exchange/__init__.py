"""What goes in and out: imports, exports, boards, Optuna studies."""
