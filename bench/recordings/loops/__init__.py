"""The loops whose memory strangers recorded or printed, written anew from what is known of them."""
