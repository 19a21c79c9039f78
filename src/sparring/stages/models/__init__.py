"""Models that a stage opens in addition to the policy, and the objective of the rl stage."""
