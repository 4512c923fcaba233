"""An account as templates would make it: their functions resolved, and roles, buckets and keys with their policies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from policy import Principal, Request, allowed, as_list

ACCOUNT = "123456789012"
_PSEUDO = {"AWS::AccountId": ACCOUNT, "AWS::Partition": "aws", "AWS::URLSuffix": "amazonaws.com"}


class Account:
    """What the stacks of one cluster hold, and whether a request to it goes through."""

    def __init__(self, templates: Mapping[str, Mapping[str, Any]], region: str = "us-west-2") -> None:
        self._templates = templates
        self._region = region
        self._exports = {
            str(self.resolve(output["Export"]["Name"], part)): (part, output["Value"])
            for part, template in templates.items()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }

    def resolve(self, value: Any, part: str) -> Any:
        """`value` of the template `part`, without functions."""
        if isinstance(value, list):
            return [self.resolve(item, part) for item in value]
        if not isinstance(value, Mapping):
            return value
        if len(value) != 1 or not next(iter(value)).startswith(("Fn::", "Ref")):
            return {name: self.resolve(item, part) for name, item in value.items()}
        ((function, given),) = value.items()
        match function:
            case "Ref":
                return self._ref(given, part)
            case "Fn::GetAtt":
                name, attribute = given if isinstance(given, list) else given.split(".", 1)
                return self._attribute(name, attribute, part)
            case "Fn::Join":
                return given[0].join(str(self.resolve(item, part)) for item in given[1])
            case "Fn::Sub":
                assert isinstance(given, str)
                return re.sub(r"\$\{([^}]+)\}", lambda found: self._substitute(found[1], part), given)
            case "Fn::ImportValue":
                other, exported = self._exports[str(self.resolve(given, part))]
                return self.resolve(exported, other)
        raise NotImplementedError(function)

    def _substitute(self, name: str, part: str) -> str:
        return str(self._attribute(*name.split(".", 1), part) if "." in name else self._ref(name, part))

    def _ref(self, name: str, part: str) -> str:
        if name == "AWS::Region":
            return self._region
        if name in _PSEUDO:
            return _PSEUDO[name]
        resource = self._templates[part]["Resources"].get(name)
        if resource is None:
            raise KeyError(f"{part}: no resource {name}")
        properties = resource.get("Properties", {})
        match resource["Type"]:
            case "AWS::S3::Bucket":
                return str(self.resolve(properties.get("BucketName", f"{part}-{name}".lower()), part))
            case "AWS::EKS::Cluster":
                return str(self.resolve(properties["Name"], part))
            case _:
                return f"{part}-{name}".lower()

    def _attribute(self, name: str, attribute: str, part: str) -> str:
        kind = self._templates[part]["Resources"][name]["Type"]
        ref = self._ref(name, part)
        match kind, attribute:
            case "AWS::S3::Bucket", "Arn":
                return f"arn:aws:s3:::{ref}"
            case "AWS::KMS::Key", "Arn":
                digest = hashlib.sha256(ref.encode()).hexdigest()[:12]
                return f"arn:aws:kms:{self._region}:{ACCOUNT}:key/{digest}"
            case "AWS::IAM::Role", "Arn":
                return f"arn:aws:iam::{ACCOUNT}:role/{ref}"
            case "AWS::EKS::Cluster", "Arn":
                return f"arn:aws:eks:{self._region}:{ACCOUNT}:cluster/{ref}"
            case _:
                return f"arn:aws:{kind.split('::')[1].lower()}:{self._region}:{ACCOUNT}:{ref}/{attribute}"

    def of_kind(self, kind: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Part, logical id and resolved properties of each resource of a type."""
        for part, template in self._templates.items():
            for name, resource in template["Resources"].items():
                if resource["Type"] == kind:
                    yield part, name, self.resolve(resource.get("Properties", {}), part)

    def output(self, key: str) -> str:
        """An output that jobs read."""
        for part, template in self._templates.items():
            if key in template.get("Outputs", {}):
                return str(self.resolve(template["Outputs"][key]["Value"], part))
        raise KeyError(key)

    def role(self, arn: str, managed: Mapping[str, Mapping[str, Any]] | None = None) -> Principal:
        """A role with the policies that the templates give it. `managed`: documents of AWS's own policies, by name."""
        for part, name, properties in self.of_kind("AWS::IAM::Role"):
            if self._attribute(name, "Arn", part) != arn:
                continue
            documents = [one["PolicyDocument"] for one in properties.get("Policies", [])]
            documents += [(managed or {})[one.rpartition("/")[2]] for one in properties.get("ManagedPolicyArns", [])]
            for other, _id, policy in self.of_kind("AWS::IAM::Policy"):
                if other == part and self._ref(name, part) in policy["Roles"]:
                    documents.append(policy["PolicyDocument"])
            return Principal(arn, policies=tuple(documents))
        raise KeyError(arn)

    def trust(self, arn: str) -> Mapping[str, Any]:
        """Who may take a role."""
        for part, name, properties in self.of_kind("AWS::IAM::Role"):
            if self._attribute(name, "Arn", part) == arn:
                found: Mapping[str, Any] = properties["AssumeRolePolicyDocument"]
                return found
        raise KeyError(arn)

    def bucket_policy(self, bucket: str) -> Mapping[str, Any] | None:
        """Of a bucket that the templates make."""
        for _part, _name, properties in self.of_kind("AWS::S3::BucketPolicy"):
            if properties["Bucket"] == bucket:
                found: Mapping[str, Any] = properties["PolicyDocument"]
                return found
        return None

    def key_policy(self, arn: str) -> Mapping[str, Any]:
        """Of a key that the templates make."""
        for part, name, properties in self.of_kind("AWS::KMS::Key"):
            if self._attribute(name, "Arn", part) == arn:
                found: Mapping[str, Any] = properties["KeyPolicy"]
                return found
        raise KeyError(arn)

    def default_key(self, bucket: str) -> str | None:
        """The key that a bucket encrypts with where a write names none; None: S3's own."""
        for part, name, properties in self.of_kind("AWS::S3::Bucket"):
            if self._ref(name, part) == bucket:
                rules = properties["BucketEncryption"]["ServerSideEncryptionConfiguration"]
                found: str | None = rules[0]["ServerSideEncryptionByDefault"].get("KMSMasterKeyID")
                return found
        return None

    def s3(self, who: Principal, action: str, bucket: str, key: str = "", **context: Any) -> bool:
        """Whether S3 does this, and KMS what it needs for it.

        Args:
            context: condition keys, `tls=False`, `prefix="jobs/"`, `encryption="AES256"`, `kms_key="arn:..."`.
        """
        known: dict[str, Any] = {
            "aws:securetransport": context.get("tls", True),
            "s3:tlsversion": context.get("tls_version", 1.2),
            "aws:principalarn": who.arn,
            "aws:principalaccount": who.account,
            "aws:sourceaccount": context.get("source_account"),
            "aws:sourcearn": context.get("source_arn"),
            "s3:prefix": context.get("prefix"),
            "s3:x-amz-server-side-encryption": context.get("encryption"),
            "s3:x-amz-server-side-encryption-aws-kms-key-id": context.get("kms_key"),
        }
        known = {name: value for name, value in known.items() if value is not None}
        resource = f"arn:aws:s3:::{bucket}/{key}" if key else f"arn:aws:s3:::{bucket}"
        if not allowed(Request(who, f"s3:{action}", resource, known), self.bucket_policy(bucket)):
            return False
        needed = {"GetObject": "Decrypt", "PutObject": "GenerateDataKey"}.get(action)
        kms = context.get("kms_key") or self.default_key(bucket)
        if context.get("encryption") and not context.get("kms_key"):
            kms = None  # S3's own key, or that of the account for S3
        if needed is None or kms is None:
            return True
        return self.kms(who, needed, kms, via=f"s3.{self._region}.amazonaws.com")

    def kms(self, who: Principal, action: str, key: str, via: str | None = None, **context: Any) -> bool:
        """Whether KMS does this with the key."""
        known = {"kms:viaservice": via} if via else {}
        known |= {"aws:principalarn": who.arn, "kms:calleraccount": who.account, **context}
        return allowed(Request(who, f"kms:{action}", key, known), self.key_policy(key))


def documents(templates: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every statement of every policy in the templates, with where it is; unresolved."""
    for part, template in templates.items():
        for name, resource in template["Resources"].items():
            text = json.dumps(resource.get("Properties", {}))
            if '"Statement"' not in text:
                continue
            properties = resource["Properties"]
            found = [properties.get(key) for key in ("PolicyDocument", "KeyPolicy", "AssumeRolePolicyDocument")]
            found += [one["PolicyDocument"] for one in properties.get("Policies", [])]
            for document in found:
                for statement in as_list(document["Statement"]) if document else []:
                    yield f"{part}.{name}", statement
