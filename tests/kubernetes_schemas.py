"""The custom resources of the manifests, as their CRDs define the fields that the manifests use.

Closed: a field that is not here is refused, so that a field which is new in a manifest has to be
looked up in its CRD first. Taken from config/crd of KEDA (keda.sh/v1alpha1), Gateway API (standard
channel, v1), its inference extension (v1), llm-d-router (llm-d.ai/v1alpha2) and KubeRay (ray.io/v1)
in August 2026. Pod templates are checked as those of the built-in kinds.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(required: str = "", **properties: Schema) -> Schema:
    names = {name.rstrip("_"): schema for name, schema in properties.items()}
    closed = {"type": "object", "properties": names, "additionalProperties": False}
    return closed | ({"required": required.split()} if required else {})


def array(items: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": items} | ({} if most is None else {"maxItems": most})


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def number(least: int | None = None, most: int | None = None) -> Schema:
    limits = {"minimum": least, "maximum": most}
    return {"type": "integer"} | {key: n for key, n in limits.items() if n is not None}


def pattern(text: str, most: int = 253) -> Schema:
    return {"type": "string", "pattern": text, "minLength": 1, "maxLength": most}


TEXT: Schema = {"type": "string"}
FULL: Schema = {"type": "string", "minLength": 1}
PATH: Schema = {"type": "string", "maxLength": 1024}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}
KIND = pattern(r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", 63)
GROUP = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
PORT = number(1, 65535)
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
METADATA: Schema = {"type": "object", "required": ["name"]}
POD_TEMPLATE: Schema = {"type": "object", "required": ["spec"]}
BOOLEAN: Schema = {"type": "boolean"}


def resource(kind: str, version: str, spec: Schema) -> Schema:
    return obj(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )


def _scaled_object() -> Schema:
    policy = obj("periodSeconds type value", periodSeconds=number(), type=TEXT, value=number())
    rules = obj(stabilizationWindowSeconds=number(), selectPolicy=TEXT, policies=array(policy))
    autoscaler = obj(name=TEXT, behavior=obj(scaleUp=rules, scaleDown=rules))
    replicas = ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]
    return obj(
        "scaleTargetRef triggers",
        scaleTargetRef=obj(
            "name", apiVersion=TEXT, kind=TEXT, name=FULL, envSourceContainerName=TEXT
        ),
        minReplicaCount=number(0),
        maxReplicaCount=number(1),
        idleReplicaCount=number(0),
        pollingInterval=number(1),
        cooldownPeriod=number(0),
        initialCooldownPeriod=number(0),
        fallback=obj(
            "failureThreshold replicas",
            failureThreshold=number(0),
            replicas=number(0),
            behavior=one_of(*replicas, "scalingModifiers"),
        ),
        advanced=obj(
            horizontalPodAutoscalerConfig=autoscaler, restoreToOriginalReplicaCount=BOOLEAN
        ),
        triggers=array(
            obj(
                "metadata type",
                type=FULL,
                name=TEXT,
                metricType=TEXT,
                useCachedMetrics=BOOLEAN,
                metadata=TEXTS,
            )
        )
        | {"minItems": 1},
    )


def _inference_pool() -> Schema:
    label = {
        "type": "string",
        "maxLength": 63,
        "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    }
    return obj(
        "selector targetPorts",
        appProtocol=one_of("http", "kubernetes.io/h2c"),
        selector=obj("matchLabels", matchLabels={"type": "object", "additionalProperties": label}),
        targetPorts=array(obj("number", number=PORT), 8) | {"minItems": 1},
        endpointPickerRef=obj(
            "name",
            group=GROUP,
            kind=KIND,
            name=NAME,
            port=obj("number", number=PORT),
            failureMode=one_of("FailOpen", "FailClose"),
        ),
    )


def _http_route() -> Schema:
    methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]
    match = obj(
        path=obj(
            type=one_of("Exact", "PathPrefix", "RegularExpression"),
            value=TEXT | {"maxLength": 1024},
        ),
        method=one_of(*methods),
    )
    reference = obj(
        "name",
        group=GROUP,
        kind=KIND,
        name=NAME,
        port=PORT,
        weight=number(0, 1_000_000),
    )
    parent = obj("name", group=GROUP, kind=KIND, name=NAME, port=PORT)
    rule = obj(
        matches=array(match, 64),
        timeouts=obj(request=DURATION, backendRequest=DURATION),
        backendRefs=array(reference, 16),
    )
    return obj(parentRefs=array(parent, 32), rules=array(rule, 16) | {"minItems": 1})


def _model_rewrite() -> Schema:
    match = obj("model", model=obj("value", type=one_of("Exact"), value=FULL))
    target = obj("modelRewrite", weight=number(1, 1_000_000), modelRewrite=TEXT)
    rule = obj(matches=array(match), targets=array(target) | {"minItems": 1})
    pool = obj("name", group=GROUP, kind=KIND, name=NAME)
    return obj("poolRef rules", poolRef=pool, rules=array(rule))


def _ray_service() -> Schema:
    head = obj(
        "template",
        rayStartParams=TEXTS,
        template=POD_TEMPLATE,
        serviceType=TEXT,
        enableIngress=BOOLEAN,
    )
    workers = obj(
        "groupName maxReplicas minReplicas template",
        groupName=TEXT,
        replicas=number(),
        minReplicas=number(),
        maxReplicas=number(),
        rayStartParams=TEXTS,
        template=POD_TEMPLATE,
    )
    cluster = obj(
        "headGroupSpec",
        rayVersion=TEXT,
        enableInTreeAutoscaling=BOOLEAN,
        autoscalerOptions=obj(securityContext={"type": "object"}),
        headGroupSpec=head,
        workerGroupSpecs=array(workers),
    )
    return obj(
        "rayClusterConfig",
        serveConfigV2=TEXT,
        rayClusterConfig=cluster,
        upgradeStrategy=obj(type=TEXT),
        serviceUnhealthySecondThreshold=number(),
        deploymentUnhealthySecondThreshold=number(),
    )


_SPECS = {
    ("keda.sh/v1alpha1", "ScaledObject"): _scaled_object,
    ("inference.networking.k8s.io/v1", "InferencePool"): _inference_pool,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _http_route,
    ("llm-d.ai/v1alpha2", "InferenceModelRewrite"): _model_rewrite,
    ("ray.io/v1", "RayService"): _ray_service,
}
SCHEMAS = {key: resource(key[1], key[0], spec()) for key, spec in _SPECS.items()}
"""By API version and kind."""
