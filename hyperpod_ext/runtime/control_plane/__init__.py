"""The worker's side of its launcher (our agent, hyperpodrun or torchrun), which begins and ends generations."""
