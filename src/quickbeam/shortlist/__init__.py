"""The part of the vocabulary that a drafter's head scores (DynaSpec, FR-Spec, NanoSpec). Knows
nothing of trees and drafters."""
