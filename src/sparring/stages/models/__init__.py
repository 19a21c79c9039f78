"""Models that a stage opens beside the policy, and the objective they serve."""
