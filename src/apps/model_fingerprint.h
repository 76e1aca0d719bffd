// Tells checkpoints apart without reading all of them, so that a job is continued with the model
// that began it.
#pragma once

#include <string>

namespace deepinfer {

// 64 hexadecimal digits that depend on names, sizes and content of config.json, tokenizer.json and
// the weight files of a directory; of a weight file, on its first 64 KiB and on 16 pieces of 4 KiB
// spread over it. Files that cannot be read count as empty: loading explains them.
std::string ModelFingerprint(const std::string& model_dir);

}  // namespace deepinfer
