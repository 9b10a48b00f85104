// Products with neurons of a sparse model, in a file of its own, which is compiled beside the others.
#include "neurons.h"

FLEX_SIZE(records, Records)

extern "C" {

// All return 0, or s + 1 if places[s] is no record. width: whole blocks of the format.

int64_t flex_record_products(const Records* args) {
    return with_records(*args, [&](auto format) { multiply_all<decltype(format)>(*args); });
}

int64_t flex_record_elements(const Records* args) {
    return with_records(*args, [&](auto format) { write_all<decltype(format)>(*args); });
}

// scratch: for all rows, and for one row again: n addresses, n weights and a mark per row, 8 bytes.
int64_t flex_record_sum(const Records* args) {
    return with_records(*args, [&](auto format) { sum_all<decltype(format)>(*args); });
}

}  // extern "C"
