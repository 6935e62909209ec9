"""The defenses, each a file with its settings beside its algorithm; adding one takes a file and a line here."""

from netweight.settings import Variants

# The first word is the name in commands, recipes and records.
DEFENSES = Variants(
    "defense",
    {
        "repnoise": "netweight.methods.immunize.defenses.repnoise:RepNoise",
        "repnoise-reference": "netweight.methods.immunize.defenses.repnoise:RepNoiseReference",
        "security-vectors": "netweight.methods.immunize.defenses.security_vectors:SecurityVectors",
        "vaccine": "netweight.methods.immunize.defenses.vaccine:Vaccine",
        "vaccine-rho10": "netweight.methods.immunize.defenses.vaccine:VaccineRho10",
        "t-vaccine": "netweight.methods.immunize.defenses.vaccine:TVaccine",
        "safety-training": "netweight.methods.immunize.defenses.safety_training:SafetyTraining",
        "gradient-ascent": "netweight.methods.immunize.defenses.gradient_ascent:GradientAscent",
        "adversarial-loss": "netweight.methods.immunize.defenses.adversarial_loss:AdversarialLoss",
        "distillation": "netweight.methods.immunize.defenses.distillation:Distillation",
        "rmu": "netweight.methods.immunize.defenses.rmu:RMU",
        "circuit-breaking": "netweight.methods.immunize.defenses.circuit_breaking:CircuitBreaking",
        "latent-adversarial": "netweight.methods.immunize.defenses.latent_adversarial:LatentAdversarial",
        "self-destruction": "netweight.methods.immunize.defenses.self_destruction:SelfDestruction",
        "booster": "netweight.methods.immunize.defenses.booster:Booster",
        "tar": "netweight.methods.immunize.defenses.tar:TAR",
        "random-weights": "netweight.methods.immunize.defenses.random_weights:RandomWeights",
    },
)
