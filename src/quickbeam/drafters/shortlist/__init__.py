"""The part of the vocabulary that a drafter's head scores (DynaSpec, FR-Spec, NanoSpec).

Nothing here knows of trees and drafters.
"""
