/* The header in a second unit of the same program. */
#include <kvpool.h>

uint32_t abi_of_second_unit(void);
float widen_in_second_unit(uint16_t scale);

uint32_t abi_of_second_unit(void) { return KVPOOL_ABI_VERSION; }
float widen_in_second_unit(uint16_t scale) { return kvpool_scale_to_f32(scale); }
