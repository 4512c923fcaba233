"""The worker's side of its launcher, which begins and ends generations: our agent, hyperpodrun or torchrun."""
