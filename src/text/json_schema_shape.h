// Whether a JSON value is a JSON Schema (draft 2020-12) as far as its shape goes: keywords have
// values of the right kind, and references into the schema lead somewhere. Which keywords a
// constraint can enforce is another matter (grammar/), as is the syntax of patterns.
#pragma once

#include "base/error.h"
#include "base/json_value.h"

namespace deepinfer {

// Errors: kInvalidArgument with the JSON path ("$.properties.a.type").
Status CheckJsonSchemaShape(const JsonValue& schema);

}  // namespace deepinfer
