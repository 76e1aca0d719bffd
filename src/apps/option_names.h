// What the library says about its fields, in the words of the command line.
#pragma once

#include "base/error.h"

namespace deepinfer {

// The error with names of options ("--max-num-seqs") in place of those of the fields that they set
// ("max_num_seqs"). For errors about options of the program only: in lines of the input the fields
// have their own names.
Error WithOptionNames(Error error);

}  // namespace deepinfer
